"""Every family under random traffic: whatever joins, leaves, is cached, drafted or aborted, tokens are those alone.

ORCHARD_FAMILIES=mamba2,lfm2 runs only these; ORCHARD_TRAFFIC is the number of schedules of each.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.runner import PLAIN, Drafts, RowOutput
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.zoo import make

pytestmark = pytest.mark.night("test_families.py has fixed schedules of each family in the gate")

CHOSEN = os.environ.get("ORCHARD_FAMILIES", "").split(",") if os.environ.get("ORCHARD_FAMILIES") else list(FAMILIES)
NUM_SCHEDULES = int(os.environ.get("ORCHARD_TRAFFIC", "8"))
SHORT, LONG = (1, 2, 3, 5, 7, 8, 9, 13, 16), (17, 31, 40, 64, 77, 100)
"""Tokens of prompts: around the chunks, the windows of 8 tokens and the pools of the tiny models."""
BOUNDARIES = (4, 5, 8, 16, 30, 45)
"""Tokens before the end of a system part."""
NUM_TOKENS = 8
MAX_STEPS = 600
LOGPROB_TOLERANCE = 1e-4


class Traffic:
    """Random requests to one engine, of prompts whose answers alone are known.

    Attributes:
        runner: Of the model.
        num_bursts: Forwards of several prompts so far.
        num_cached: Requests that a cached prefix has served.
    """

    def __init__(self, runner: MLXRunner, family: str):
        self.num_bursts = self.num_cached = 0
        self.runner, self._family = runner, family
        rng = random.Random(family)
        texts = [np.array([rng.randrange(10, 500) for _ in range(max(LONG))], np.int32) for _ in range(2)]
        lengths = [*rng.sample(SHORT, 4), *rng.sample(LONG, 5)]
        self._prompts = [rng.choice(texts)[:length] for length in lengths]
        alone = Driver(runner, EngineConfig.model_validate({"prefix_cache": {"enabled": False}}))
        for number in range(len(self._prompts)):
            alone.run({0: [self._request(number, f"{number}", ())]})
        self._answers = [(alone.tokens[f"{i}"], logprobs_of(alone, f"{i}")) for i in range(len(self._prompts))]

    def run(self, seed: int) -> None:
        """Run a schedule, and assert that each request that was not aborted has its tokens, and no row is left."""
        rng = random.Random(f"{self._family} {seed}")
        driver = self._driver(rng)
        arrivals = {f"{seed}-{i}": (rng.choice((0, 0, 1, 2, 5)), rng.randrange(9)) for i in range(rng.randrange(2, 9))}
        aborts = {name: rng.randrange(1, 10) for name in arrivals if rng.random() < 0.2}
        waiting, live = dict(arrivals), set[str]()
        for step in range(MAX_STEPS):
            for name, (_, number) in [one for one in waiting.items() if one[1][0] <= step]:
                del waiting[name]
                live.add(name)
                length = len(self._prompts[number])
                places = [place for place in BOUNDARIES if place < length]
                boundaries = (Boundary("system", rng.choice(places)),) if places and rng.random() < 0.7 else ()
                driver.core.add_request(self._request(number, name, boundaries))
            for name in [one for one in live if aborts.get(one, MAX_STEPS) <= step and one not in driver.finish]:
                live.remove(name)
                driver.core.abort(name)
            if not waiting and live <= driver.finish.keys():
                break
            driver.core.step()
        driver.core.step()  # drops what was aborted last
        for name in live:
            tokens, logprobs = self._answers[arrivals[name][1]]
            assert driver.errors[name] is None
            assert driver.tokens[name] == tokens, name
            np.testing.assert_allclose(logprobs_of(driver, name), logprobs, atol=LOGPROB_TOLERANCE, err_msg=name)
        memory = self.runner.memory()
        assert memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0
        self.num_bursts += driver.core.stats.num_bursts
        self.num_cached += sum(driver.chunks[name][0].num_cached > 0 for name in live)

    def _driver(self, rng: random.Random) -> Driver:
        """Return an engine with random sizes of chunks and random predictions, whose steps draft at random."""
        has_cache = rng.random() < 0.6
        cache = {"enabled": True, "min_tokens": rng.choice((4, 16))} if has_cache else {"enabled": False}
        config: dict[str, Any] = {
            "prefill_chunk_tokens": rng.choice((16, 23, 64, 2048)),
            "prefill_chunk_tokens_busy": rng.choice((16, 17, 24, 32, 48, 64)),
            "prefix_cache": cache,
        }
        driver = Driver(self.runner, EngineConfig.model_validate(config))
        forward_s = 10 ** rng.uniform(-3, 0)
        fix_prefill_costs(driver.core, forward_s, forward_s * 10 ** rng.uniform(-4, -1))
        share = rng.choice((0.0, 0.3, 0.7)) if "prompt_lookup" not in self.runner.no_drafts else 0.0
        decode: Callable[[Drafts], dict[str, RowOutput]] = type(self.runner).decode.__get__(self.runner)

        def sometimes_draft(drafts: Drafts = PLAIN) -> dict[str, RowOutput]:
            drafts_now = rng.random() < share
            return decode(Drafts(rng.choice((1, 2, 4)), "prompt_lookup", is_forced=True) if drafts_now else drafts)

        self.runner.decode = sometimes_draft  # type: ignore[method-assign]
        return driver

    def _request(self, number: int, name: str, boundaries: tuple[Boundary, ...]) -> EngineRequest:
        sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
        return EngineRequest(name, self._prompts[number], sampling, (), boundaries=boundaries)


def logprobs_of(driver: Driver, name: str) -> list[float]:
    return [one.logprob for chunk in driver.chunks[name] for one in chunk.logprobs]


@pytest.fixture(params=CHOSEN)
def traffic(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Traffic]:
    """Runners are never closed, see test_families.py."""
    path = make(tmp_path / "model", FAMILIES[request.param])
    limits = {"max_context_tokens": 192, "max_running": 4, "expand_quantized_weights": "off"}
    config = EngineConfig.model_validate({"model": str(path), **limits})
    yield Traffic(load_runner(config, lambda progress: None), request.param)
    mx.clear_cache()


def test_requests_get_the_tokens_that_they_get_alone_under_any_traffic(traffic: Traffic):
    """Schedules go on until one had a burst and one a cached prefix, which short and few prompts need not have."""
    runner, seed = traffic.runner, 0
    while seed < NUM_SCHEDULES or not (traffic.num_bursts or runner.no_bursts is not None) or not traffic.num_cached:
        assert seed < NUM_SCHEDULES + 32, f"{traffic.num_bursts} bursts, {traffic.num_cached} cached prompts"
        traffic.run(seed)
        seed += 1
