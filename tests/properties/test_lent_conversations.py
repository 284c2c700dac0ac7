"""Conversations whose turns continue each other while memory is short: each token is that of an engine without a cache.

ORCHARD_SCHEDULES=1000 runs that many more of them.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.conversations import plain_tokens
from tests.support.driver import Driver

NUM_SEEDS = 4 + int(os.environ.get("ORCHARD_SCHEDULES", "0"))
MODELS = (
    {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    {"layers": 4, "interval": 2, "mtp": False},
)
NUM_REQUESTS = 7
MAX_STEPS = 3000
ROOMY_TOKENS = 4000
"""Memory for one row of so many tokens also holds snapshots, whichever of the others run side by side."""


@pytest.fixture(scope="module")
def runners(tiny_model: Callable[..., Path]) -> list[MLXRunner]:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    configs = [EngineConfig.model_validate({"model": str(tiny_model(**model))}) for model in MODELS]
    return [load_runner(config, lambda progress: None) for config in configs]


class Conversations:
    """Some clients, each of which continues what it was answered; others abort, and rows are preempted, at random."""

    def __init__(self, runner: MLXRunner, seed: int):
        self.runner, self.rng, self.seed = runner, random.Random(seed), seed
        self.mtp = self.rng.choice(["off", {"max_draft_tokens": 3}]) if "mtp" not in runner.no_drafts else "off"
        self.system = plain_tokens(("system", seed), 40)
        self.sent: dict[str, EngineRequest] = {}
        self.open: dict[str, int] = {}
        """By request id: its conversation."""
        self.num_tokens = self.rng.choice([700, 1100, ROOMY_TOKENS])
        self.driver = Driver(runner, self.config(self.limit_gb(self.num_tokens)))

    def limit_gb(self, num_tokens: int) -> float:
        """Return the limit of an engine with room for one row of `num_tokens`, beside the other models of this
        process."""
        ids = np.zeros(num_tokens, np.int32)
        budget = Driver(self.runner, self.config(None)).core.budget
        alone = budget.needs.min_bytes(budget.needs.need([Row(EngineRequest("alone", ids, SamplingParams(1), ()))]))
        return (max(self.runner.active_bytes, budget.costs.base_bytes) + alone) / 2**30

    def config(self, limit_gb: float | None, **cache: bool) -> EngineConfig:
        memory = {"limit_gb": limit_gb, "headroom_gb": 0, "reserve_tokens": 16}
        settings = {
            "mtp": self.mtp,
            "prompt_lookup": "off",
            "prefill_chunk_tokens": 64,
            "memory": memory,
            "prefix_cache": cache,
        }
        return EngineConfig.model_validate(settings)

    def run(self) -> None:
        rng, core = self.rng, self.driver.core
        for number in range(3):
            self.send(number, self.system)
        for _ in range(MAX_STEPS):
            if not core.has_work and not self.open:
                break
            core.step()
            if rng.random() < 0.01 and self.open:
                core.abort(rng.choice(list(self.open)))
            if rng.random() < 0.03 and (running := list(core.scheduler._running.values())):
                core.scheduler.preempt(rng.choice(running), "growth")
            if rng.random() < 0.005:
                core.free_evictable()
            self.go_on()
        assert not core.has_work and core.prefixes.store.integrity_error() is None
        assert core.prefixes.store.counters.num_integrity_errors == 0
        memory = self.runner.memory()
        assert memory["decode_cache_bytes"] == 0 and memory["prefill_cache_bytes"] == 0

    def go_on(self) -> None:
        ended = [name for name in self.open if name in self.driver.finish or self.is_aborted(name)]
        for name in ended:
            number, before = self.open.pop(name), self.sent[name]
            said = np.array(self.driver.tokens[name], np.int32)
            is_new = self.rng.random() < 0.2
            self.send(number, self.system if is_new else np.concatenate([before.token_ids, said]))

    def is_aborted(self, name: str) -> bool:
        return name not in self.driver.core.scheduler._rows

    def send(self, number: int, before: np.ndarray) -> None:
        if len(self.sent) == NUM_REQUESTS:
            return
        name, rng = f"{self.seed}.{len(self.sent)}", self.rng
        ids = np.concatenate([before, plain_tokens(name, rng.randrange(5, 120))])
        boundaries = (Boundary("system", len(self.system)), Boundary("turn", len(ids)))
        ids = np.concatenate([ids, plain_tokens("generation", 3)]).astype(np.int32)
        sampling = SamplingParams(rng.choice([3, 17, 22]), temperature=rng.choice([0.0, 1.0]), seed=len(self.sent))
        request = EngineRequest(name, ids, sampling, (), boundaries=boundaries)
        if self.driver.core.budget.needs.clamp_max_tokens(request, self.driver.core.figures.pinned_bytes) != request:
            request = replace(request, token_ids=self.system, boundaries=())
        self.sent[name] = request
        self.open[name] = number
        self.driver.core.add_request(request)

    def check(self) -> int:
        """Returns how many of the prompts' tokens came from the cache."""
        cold = Driver(self.runner, self.config(None, enabled=False))
        expected = cold.run({0: list(self.sent.values())})
        for name, request in self.sent.items():
            said = self.driver.tokens[name]
            assert said == expected[name][: len(said)], f"{name} of seed {self.seed}"
            if name in self.driver.finish:
                assert self.driver.finish[name] is FinishReason.LENGTH, self.driver.errors[name]
                assert len(said) == request.sampling.max_tokens
        return self.driver.core.stats.num_cached_tokens


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_conversation_gets_the_tokens_of_an_engine_without_a_prefix_cache(runners, seed):
    conversations = Conversations(runners[seed % len(runners)], seed)
    conversations.run()
    num_cached = conversations.check()
    assert num_cached or conversations.num_tokens < ROOMY_TOKENS or len(conversations.sent) < 4
