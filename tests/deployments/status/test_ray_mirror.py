"""The metrics in Ray are the engine's own figures."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from deployments.metrics.catalog import METRICS
from deployments.metrics.node_figures import NodeFigures
from deployments.status.ray_mirror import RayMirror, mirror_to_ray
from engine.async_engine import AsyncEngine
from engine.ended_rows import EndedRows
from engine.figures import EngineFigures
from engine.histogram import Histogram
from engine.protocol import EngineRequest, SamplingParams
from engine.status import EngineStatus
from tests.engine.test_async_engine import CountingRunner
from tests.support.fake_runner import run_engine

Values = dict[tuple[str, ...], Any]


class RayMetric:
    """One metric of Ray, with Ray's own rules."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: list[float] | None = None):
        assert ":" not in name and description
        assert not {"deployment", "replica", "application"} & set(tag_keys)
        self.tag_keys = tag_keys
        self.boundaries = boundaries
        self.values: Values = {}

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0) + value

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.values[self._key(tags)] = value

    def observe(self, value: float, tags: Mapping[str, str]) -> None:
        assert self.boundaries and min(self.boundaries) > 0
        self.values.setdefault(self._key(tags), Histogram(self.boundaries)).observe(value)

    def _key(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.tag_keys)
        assert tags["model_name"] == "demo"
        return tuple(tags[key] for key in self.tag_keys if key not in ("model_name", "engine"))


class Ray:
    """Makes metrics as ray.serve.metrics does, each once."""

    def __init__(self):
        self.metrics: dict[str, RayMetric] = {}
        self.Counter = self.Gauge = self.Histogram = self._make

    def _make(self, name: str, **fields: Any) -> RayMetric:
        assert name not in self.metrics
        self.metrics[name] = RayMetric(name, **fields)
        return self.metrics[name]


def test_counters_gauges_and_histograms_are_those_of_the_engine():
    ray = Ray()
    mirror = RayMirror("demo", kinds=ray)

    async def serve(engine: AsyncEngine) -> None:
        await engine.wait_ready()
        for turn in range(3):
            requests = [
                EngineRequest(
                    f"r{turn}-{i}", np.zeros(3 + i, np.int32), SamplingParams(4 + turn), (), num_choices=1 + i
                )
                for i in range(3)
            ]
            await asyncio.gather(*(_drained(engine, request) for request in requests))
            left: Any = engine.generate(EngineRequest(f"left{turn}", np.zeros(3, np.int32), SamplingParams(500), ()))
            await anext(left)
            await left.aclose()
            mirror.update(engine.figures(), engine.ended.take())
        while (figures := engine.figures()).requests.finished.get("abort") != 3:
            await asyncio.sleep(0.01)
        mirror.update(figures, engine.ended.take())
        found.append(figures)

    found: list[EngineFigures] = []
    run_engine(serve, CountingRunner(), {})
    node = NodeFigures(model="demo", engine=found[0])
    not_there = set()
    for metric in METRICS:
        samples = dict(metric.read(node))
        if not samples:
            continue
        mirrored = ray.metrics.get(metric.name.replace(":", "_"))
        if mirrored is None:
            not_there.add(metric.name)
        elif metric.kind == "histogram":
            expected = samples[()]
            assert isinstance(expected, Histogram)
            got = mirrored.values.get((), Histogram(expected.bounds))
            assert (got.bounds, got.counts, got.total) == (
                expected.bounds,
                expected.counts,
                pytest.approx(expected.total),
            )
        elif metric.kind == "counter":
            assert mirrored.values == {values: value for values, value in samples.items() if value}, metric.name
        else:
            assert mirrored.values == samples, metric.name
    assert not_there == {metric.name for metric in METRICS if metric.kind == "histogram" and metric.of_choice is None}
    assert ray.metrics["vllm_request_success"].values == {("length",): 18, ("abort",): 3}
    assert sum(ray.metrics["vllm_time_to_first_token_seconds"].values[()].counts) == 18


async def _drained(engine: AsyncEngine, request: EngineRequest) -> None:
    async for _ in engine.generate(request):
        pass


RAY_LLM_BOARD = {
    "counter": {"prompt_tokens", "generation_tokens", "prefix_cache_hits", "prefix_cache_queries", "request_success"},
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"},
    "histogram": {
        "request_prompt_tokens",
        "request_generation_tokens",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    },
}
"""Metrics of the panels of Ray's dashboard "Serve LLM", without those of the disaggregated servers of vLLM."""


def test_rays_own_dashboard_finds_its_metrics():
    for kind, names in RAY_LLM_BOARD.items():
        found = {
            metric.name.removeprefix("vllm:")
            for metric in METRICS
            if metric.kind == kind and (kind != "histogram" or metric.of_choice is not None)
        }
        assert names <= found


def test_errors_do_not_end_the_mirror(caplog: pytest.LogCaptureFixture):
    class Engine:
        num_asked = 0
        ended = EndedRows()

        def figures(self) -> EngineFigures:
            self.num_asked += 1
            if self.num_asked in (2, 3):
                raise RuntimeError("the device is away")
            return EngineFigures(status=EngineStatus(state="ready", model="x", load_progress=1.0))

    async def go() -> None:
        task = asyncio.ensure_future(mirror_to_ray(engine, RayMirror("demo", kinds=ray), period_s=0.001))
        while engine.num_asked < 6:
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()

    engine, ray = Engine(), Ray()
    asyncio.run(go())
    assert ray.metrics["orchard_engine_ready"].values == {(): 1}
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"


def test_a_counter_that_grew_nothing_is_not_increased():
    ray = Ray()
    mirror = RayMirror("demo", kinds=ray)
    figures = EngineFigures(status=EngineStatus(state="ready", model="x", load_progress=1.0, num_output_tokens=5))
    for _ in range(3):
        mirror.update(figures, [])
    assert ray.metrics["vllm_generation_tokens"].values == {(): 5}
