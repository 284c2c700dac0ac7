"""Thousands of steps with rows that come and go: nothing grows.

ORCHARD_SOAK_STEPS=10000 makes it long. -s prints the figures.
"""

import faulthandler
import gc
import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import Drafts
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold

NUM_STEPS = int(os.environ.get("ORCHARD_SOAK_STEPS", "750"))
NUM_STRETCHES = 5
NUM_QUIET = 130  # steps in which nobody comes or goes: a lazy graph can only grow then
MAX_ROWS = 5
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 20, "logprobs": 3, "logit_bias": ((7, 2.0),), "min_tokens": 5},
)
ENDLESS = 10**6


@dataclass(frozen=True)
class Figures:
    """Figures of a period in which the same rows run each time.

    active_bytes: MLX's, without the caches; smallest of the stretch. num_pending: operations that wait to be computed;
    the most. num_arrays, num_objects: MLX's and all that Python's collector knows; the fewest.
    """

    step: int
    active_bytes: int
    num_pending: int
    num_arrays: int
    num_objects: int
    ms_per_step: float


class Soak:
    """Rows for a runner. One of them stays for ever, in a batch that is never empty."""

    def __init__(self, runner: MLXRunner):
        self._runner, self._rng, self._ids = runner, random.Random(5), count()
        self._left: dict[str, int] = {}  # tokens that each row wants yet
        self.num_steps = self.num_tokens = self.num_rows = 0
        self._join(ENDLESS, 0)

    def churn(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._drop([row_id for row_id, left in self._left.items() if left <= 0 or self._is_aborted(left)])
            self._step(self._rng.choice([0, 0, 0, 1, 2, 3]))
            if len(self._left) < self._rng.randint(1, MAX_ROWS):
                self._join(self._rng.randint(5, 30), self._rng.randrange(len(SAMPLING)))

    def quiet(self, num_steps: int) -> Figures:
        """The one that stays and three others, without coming and going."""
        self._drop([row_id for row_id, left in self._left.items() if left < ENDLESS / 2])
        for kind in range(1, len(SAMPLING)):
            self._join(ENDLESS // 3, kind)
        began_s = time.perf_counter()
        for i in range(num_steps):
            self._step(0 if i % 64 < 32 else 2)
        ms_per_step = (time.perf_counter() - began_s) / num_steps * 1e3
        seen: list[tuple[int, int, int, int]] = []
        for i in range(8):  # a period of whatever is computed now and then
            self._step(2 * (i % 2))
            seen.append(self._look())
        active, pending, arrays, objects = zip(*seen, strict=True)
        return Figures(self.num_steps, min(active), max(pending), min(arrays), min(objects), ms_per_step)

    def close(self) -> None:
        self._drop(list(self._left))

    def _is_aborted(self, left: int) -> bool:
        return left < ENDLESS / 2 and self._rng.random() < 0.02

    def _drop(self, row_ids: list[str]) -> None:
        for row_id in row_ids:
            del self._left[row_id]
        self._runner.drop(row_ids)

    def _join(self, max_tokens: int, kind: int) -> None:
        prompt = np.array([self._rng.randrange(16, 512) for _ in range(self._rng.randint(1, 12))], np.int32)
        sampling = SamplingParams(max_tokens, seed=self._rng.randrange(2**32), **SAMPLING[kind])
        row = Row(EngineRequest(str(next(self._ids)), prompt, sampling, (40, 41)))
        self._runner.prefill([row], len(prompt))
        self._left[row.id] = max_tokens - 1
        self.num_rows += 1

    def _step(self, num_drafts: int) -> None:
        for row_id, output in self._runner.decode(Drafts(num_drafts)).items():
            self._left[row_id] -= len(output.token_ids)
            self.num_tokens += len(output.token_ids)
        self.num_steps += 1

    def _look(self) -> tuple[int, int, int, int]:
        mx.synchronize()  # the step in flight counts as computed
        gc.collect()
        cache_bytes = self._runner.memory()["decode_cache_bytes"]
        objects = gc.get_objects()
        arrays = [each for each in objects if type(each) is mx.array]
        return mx.get_active_memory() - cache_bytes, _num_pending(arrays), len(arrays), len(objects)


def _num_pending(arrays: list[mx.array]) -> int:
    """Count the operations behind these arrays that have not been computed.

    A child process does it: the library's walk over the graph (MLX 0.32.4) is recursive, and ends with a segmentation
    fault behind some 100,000 operations in a row.
    """
    path = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"orchard-soak-{os.getpid()}.dot"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child needs none
        child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.disable()
            mx.export_to_dot(str(path), *arrays)
            status = 0
        finally:
            os._exit(status)
    try:
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"a walk over {len(arrays)} arrays ended with {os.waitstatus_to_exitcode(status)}"
        return path.read_text().count("[label =")
    finally:
        path.unlink(missing_ok=True)


def test_memory_and_object_counts_do_not_grow_over_many_steps(
    tiny_model: Callable[..., Path], request: pytest.FixtureRequest
):
    path = tiny_model(layers=2, interval=2, hidden=32, heads=2, kv_heads=1, agree=0.3)
    # Models that other tests have made left a key of the library's random numbers behind a split for each weight that
    # was never drawn.
    mx.random.seed(0)
    gc.freeze()  # objects of other tests are neither visited nor counted
    request.addfinalizer(gc.unfreeze)
    runner = load_cold(EngineConfig(model=str(path)))
    soak = Soak(runner)
    figures = []
    for _ in range(NUM_STRETCHES):
        soak.churn(NUM_STEPS // NUM_STRETCHES - NUM_QUIET)
        figures.append(soak.quiet(NUM_QUIET))
        print(f"\n{figures[-1]}, {soak.num_rows} rows, {soak.num_tokens} tokens", end="")  # noqa: T201
    soak.close()
    memory = runner.memory()
    assert memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0
    first, *_, last = figures[2:]  # what is made once is there by then, and the one that stays has its own group
    assert last.num_pending <= first.num_pending + 100, figures
    assert last.active_bytes <= first.active_bytes + 2**14, figures
    assert last.num_arrays <= first.num_arrays + 40, figures
    assert last.num_objects <= first.num_objects + 120, figures
