"""Measured memory costs are read back exactly, and measured again whenever they may not hold."""

import gc
import json
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.worker import cost_cache, memory_costs, model_runner
from engine.worker.cost_cache import costs_key, load_or_measure
from engine.worker.memory_costs import MARGIN

COSTS = MemoryCosts(base_bytes=1000, token_bytes=7, slot_step_bytes=0.1, token_step_bytes=93327.91041666667)


class Measurement:
    """Counts how often it is made; its base includes the active memory, as the real one's does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> MemoryCosts:
        self.count += 1
        return MemoryCosts(**{**asdict(COSTS), "base_bytes": mx.get_active_memory() + COSTS.base_bytes})


def test_costs_are_measured_once_and_read_back_equal(tmp_path: Path):
    measurement = Measurement()
    first = load_or_measure(tmp_path / "new", "key", measurement)
    assert load_or_measure(tmp_path / "new", "key", measurement) == first
    assert measurement.count == 1
    load_or_measure(tmp_path / "new", "other key", measurement)
    assert measurement.count == 2


def test_the_base_follows_the_memory_that_is_active_at_the_start(tmp_path: Path):
    before = load_or_measure(tmp_path, "key", Measurement())
    held = mx.zeros(2**20, mx.uint8)
    mx.eval(held)
    after = load_or_measure(tmp_path, "key", Measurement())
    assert after.base_bytes - before.base_bytes >= held.nbytes


def test_garbage_that_is_still_held_at_the_first_start_is_not_subtracted_at_the_next_one(tmp_path: Path):
    class Cycle:
        def __init__(self) -> None:
            self.own, self.array = self, mx.zeros(2**20, mx.uint8)

    class CollectingMeasurement(Measurement):
        def __call__(self) -> MemoryCosts:
            gc.collect()  # as the real one does
            return super().__call__()

    gc.collect()
    gc.disable()
    try:
        mx.eval(Cycle().array)
        load_or_measure(tmp_path, "key", CollectingMeasurement())
    finally:
        gc.enable()
    base = load_or_measure(tmp_path, "key", Measurement()).base_bytes
    assert base == mx.get_active_memory() + COSTS.base_bytes


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({**asdict(COSTS), "more": 1}), json.dumps({**asdict(COSTS), "token_bytes": "7"})],
)
def test_a_file_that_cannot_be_trusted_is_measured_again_and_replaced(tmp_path: Path, text: str):
    measurement = Measurement()
    expected = load_or_measure(tmp_path, "key", measurement)
    (tmp_path / "key.json").write_text(text)
    assert load_or_measure(tmp_path, "key", measurement) == expected
    assert load_or_measure(tmp_path, "key", measurement) == expected
    assert measurement.count == 2


def test_a_directory_that_cannot_be_made_costs_only_the_measurement(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert load_or_measure(tmp_path / "file", "key", Measurement()).token_bytes == COSTS.token_bytes


def test_the_directory_keeps_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost_cache, "MAX_FILES", 3)
    for i in range(5):
        load_or_measure(tmp_path, f"key{i}", Measurement())
    assert len(list(tmp_path.iterdir())) == 3


def test_the_key_depends_on_the_model_its_settings_and_the_code(monkeypatch: pytest.MonkeyPatch):
    key = costs_key("model", 3, False)
    assert costs_key("model", 3, False) == key
    assert len({key, costs_key("other", 3, False), costs_key("model", 0, False), costs_key("model", 3, True)}) == 4
    monkeypatch.setattr(cost_cache, "_source_digest", lambda: "changed")
    assert costs_key("model", 3, False) != key


def test_a_second_start_of_a_model_reuses_the_measured_costs(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, measured = EngineConfig(model=str(tiny_model())), []
    original = memory_costs.measure
    monkeypatch.setattr(memory_costs, "measure", lambda *args: measured.append(original(*args)) or measured[-1])
    runners = [model_runner.load_runner(config, lambda progress: None) for _ in range(2)]
    assert len(measured) == 1
    first, second = (asdict(runner.costs) for runner in runners)
    assert {**first, "base_bytes": 0} == {**second, "base_bytes": 0}
    assert second["base_bytes"] >= first["base_bytes"], "the first runner's weights are still there"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_row_on_a_gpu_takes_the_bytes_of_its_next_states_in_a_step(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
):
    """Steps of two rows, as they are measured, are done before the host has allocated the states of all layers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory_costs, "_decoding", lambda runner, drafts: 0)
    monkeypatch.setattr(memory_costs, "devices", SimpleNamespace(on_gpu=lambda: on_gpu, device_kind=lambda: "cpu"))
    costs = model_runner.load_runner(EngineConfig(model=str(tiny_model())), lambda progress: None).costs
    assert costs.state_bytes > 0
    expected = MARGIN * costs.state_bytes if on_gpu else 0
    assert costs.row_step_bytes == pytest.approx(expected, abs=1)


def test_peaks_that_differ_by_how_far_the_host_is_ahead_count_as_no_scores(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On CUDA; of 192 tokens such a difference counted as 120 KB per pair, and chunks had 26 tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory_costs, "CUDA_PROBE_TOKENS", 192)
    noise = cycle([0, 10**9, 3 * 10**8, 6 * 10**8])
    peak = memory_costs._peak
    monkeypatch.setattr(memory_costs, "_peak", lambda work: peak(work) + next(noise))
    monkeypatch.setattr(memory_costs, "devices", SimpleNamespace(on_gpu=lambda: True, device_kind=lambda: "cuda"))
    costs = model_runner.load_runner(EngineConfig(model=str(tiny_model())), lambda progress: None).costs
    assert costs.pair_bytes < 10**4
    assert 10**9 < costs.chunk(384, 384) < costs.chunk(384, 8192) < 2 * 10**9
