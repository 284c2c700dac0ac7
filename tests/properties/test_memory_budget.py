"""The budget's bytes against those that MLX uses: never fewer, also within a step; between steps at most 30 % more at
the peak."""

import gc
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.memory.budget import HEADROOM_SHARE
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.driver import Driver

DEMO = EngineConfig()


class Books:
    """Runs an engine, and compares the bytes in use after each step and the peak of each step with the budget.

    Attributes:
        peak: Most bytes within a step, without one step's intermediate results, which a late device holds beside those
            of the next step.
        least_margin: Least share of a step's peak that was in the books, with these results counted twice.
    """

    def __init__(self, runner: MLXRunner, **config: Any):
        self.driver = Driver(runner, EngineConfig.model_validate({"prefix_cache": {"enabled": False}} | config))
        self.core, self.budget = self.driver.core, self.driver.core.budget
        self.peak = self.active = self.booked_at_peak = 0
        self.least_margin = float("inf")
        self._scheduled = 0
        gc.collect()  # other models of this process, and what is left of other tests
        mx.synchronize()  # and of their steps that are still being computed
        for _ in range(50):  # and of their threads, which end in the background
            before = mx.get_active_memory()
            time.sleep(0.1)
            gc.collect()
            if mx.get_active_memory() == before:
                break
        self._others = max(0, mx.get_active_memory() - runner.costs.base_bytes)
        self._schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = self._watched  # type: ignore[method-assign]
        self._chunk_tokens = self.core.scheduler.prefills.chunk_tokens
        self.core.scheduler.prefills.chunk_tokens = self._watched_chunk  # type: ignore[method-assign]
        self._burst = self.core.scheduler.prefills.burst
        self.core.scheduler.prefills.burst = self._watched_burst  # type: ignore[method-assign]

    def _watched(self, drafts: Drafts = PLAIN) -> Any:
        work = self._schedule(drafts)
        self._scheduled = self.booked()
        return work

    def _watched_chunk(self, prompt: Prompt) -> int:
        num_tokens = self._chunk_tokens(prompt)
        self._scheduled = max(self._scheduled, self.booked())
        return num_tokens

    def _watched_burst(self, *chunks: Any) -> Any:
        burst = self._burst(*chunks)
        self._scheduled = max(self._scheduled, self.booked())
        return burst

    def _now(self, peak: int = 0) -> int:
        return max(peak, mx.get_active_memory()) - self._others  # without an allocation there is no peak

    def booked(self) -> int:
        return self.budget.needs.limit_bytes - self.budget.free_bytes - self.budget.unaccounted_bytes

    def run(self, requests: list[EngineRequest], aborted: tuple[str, ...] = ()) -> None:
        for request in requests:
            self.core.add_request(request)
        steps = 0
        while self.core.has_work:
            steps += 1
            if steps == 25:
                for request_id in aborted:
                    self.core.abort(request_id)
            before, transient = self.booked(), self.budget.accounts.transient_bytes
            mx.reset_peak_memory()
            self.core.step()
            booked, peak = max(before, self._scheduled, self.booked()), self._now(mx.get_peak_memory())
            # The next step is launched before this one is read. A device that is behind, as on a busy machine, frees
            # this one's results only after it has allocated those of the next.
            ahead = max(transient, self.budget.accounts.transient_bytes)
            self.least_margin = min(self.least_margin, (booked + ahead) / peak)
            resident = self.booked() - self.budget.accounts.transient_bytes
            if not self.budget.reserved_bytes:
                mx.synchronize()  # the round ahead that nobody needs any more is still being computed
            assert self._now() <= resident, "what is there between two steps is in the books"
            self.peak = max(self.peak, peak - ahead)
            if self._now() > self.active:
                self.active, self.booked_at_peak = self._now(), resident

    def check(self) -> None:
        over = self.booked_at_peak / self.active - 1
        logging.getLogger("orchard.test").info("peak %d bytes, booked %.1f %% more", self.active, 100 * over)
        assert self.least_margin >= 1 - HEADROOM_SHARE, (
            f"{self.least_margin:.3f}: what is not in the books fits the headroom"
        )
        assert over <= 0.3, "at most 30 % over at the peak"
        assert self.budget.reserved_bytes == 0


def requests(
    num: int, num_prompt: int | tuple[int, ...], max_tokens: int, n: int = 1, seed: int = 3
) -> list[EngineRequest]:
    rng = random.Random(seed)
    sizes = num_prompt if isinstance(num_prompt, tuple) else (num_prompt,)
    made = []
    for i in range(num):
        prompt = np.array([rng.randrange(20, 400) for _ in range(rng.choice(sizes))], np.int32)
        made.append(EngineRequest(f"r{i}", prompt, SamplingParams(max_tokens, seed=i), (), num_choices=n))
    return made


@pytest.fixture(scope="module")
def demo() -> MLXRunner:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    return load_runner(DEMO, lambda progress: None)


@pytest.fixture(scope="module")
def wide(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Few weights and large caches."""
    path = tiny_model(layers=4, interval=2, hidden=64, heads=4, kv_heads=4, agree=0.3)
    return load_runner(EngineConfig(model=str(path)), lambda progress: None)


LONG = pytest.mark.night("the model with few weights has longer prompts in the gate")
MIXED = pytest.mark.night("the model with few weights, whose accounts are tighter, has many rows in the gate")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(lambda: requests(1, 2500, 40), id="one long prompt", marks=LONG),
        pytest.param(lambda: requests(10, 500, 120), id="many short ones", marks=MIXED),
        pytest.param(lambda: requests(3, 700, 40, n=3), id="choices"),
        pytest.param(lambda: requests(6, (50, 200, 1500), 60), id="rows of all lengths", marks=MIXED),
    ],
)
def test_memory_of_the_demo_model_matches_the_budget(demo: MLXRunner, asked: Callable[[], list[EngineRequest]]):
    books = Books(demo)
    books.run(asked())
    books.check()


@pytest.mark.parametrize(
    "asked",
    [pytest.param(lambda: requests(10, 400, 100), id="many"), pytest.param(lambda: requests(2, 3000, 100), id="long")],
)
def test_memory_of_a_model_with_few_weights_matches_the_budget(
    wide: MLXRunner, asked: Callable[[], list[EngineRequest]]
):
    books = Books(wide)
    books.run(asked())
    books.check()


def test_memory_with_keys_and_values_of_four_bits_never_exceeds_the_budget(tiny_model: Callable[..., Path]):
    """In a step one layer's are dequantized, for which nothing is held between two steps."""
    path = tiny_model(layers=4, interval=2, hidden=64, heads=4, kv_heads=4, agree=0.3)
    config = EngineConfig.model_validate({"model": str(path), "kv_cache": {"bits": 4}})
    books = Books(load_runner(config, lambda progress: None))
    books.run(requests(6, (60, 500), 40))
    assert books.least_margin >= 1 - HEADROOM_SHARE and books.budget.reserved_bytes == 0


def test_memory_with_cached_prefixes_and_aborted_rows_never_exceeds_the_budget(demo: MLXRunner):
    books = Books(demo, prefix_cache={"enabled": True, "max_gb": 0.05}, memory={"reserve_tokens": 32})
    shared = requests(1, 600, 60)[0].token_ids
    made = [
        EngineRequest(
            f"r{i}",
            np.concatenate([shared, other.token_ids]),
            other.sampling,
            (),
            boundaries=(Boundary("system", 600),),
        )
        for i, other in enumerate(requests(8, (30, 400), 90, seed=5))
    ]
    books.run(made, aborted=("r1", "r6"))
    assert books.least_margin >= 1 - HEADROOM_SHARE and books.budget.reserved_bytes == 0
    assert books.core.prefixes.store.num_bytes > 0 and books.core.stats.num_cached_tokens > 0
    books.core.prefixes.store.reset()


def test_a_tight_memory_limit_delays_tokens_but_does_not_change_them(wide: MLXRunner):
    """Rows make room for one another and go on; the memory stays within its limit, late results aside."""
    asked = requests(5, (60, 500), 400)
    expected = Driver(wide).run({0: asked})
    memory = {"headroom_gb": 0, "reserve_tokens": 16}
    books = Books(wide, memory=memory, prefill_chunk_tokens=64).budget
    needs = [books.needs.need([Row(one)], whole=True) for one in asked]
    row = max(wide.costs.rows(1, wide.costs.slots(need.num_tokens)) for need in needs)
    limit = wide.costs.base_bytes + max(books.needs.min_bytes(need) for need in needs) + row
    tight = Books(wide, memory=memory | {"limit_gb": limit / 2**30}, prefill_chunk_tokens=64)
    tight.run(asked)
    assert dict(tight.driver.tokens) == expected
    assert tight.core.stats.num_preempted > 0 and tight.peak <= limit
