"""Loads runners without timing and measuring, for tests of many models that need neither."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np

from engine import async_engine
from engine.config import EngineConfig
from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader, memory
from engine.worker.model_runner import MLXRunner

NUM_TOKENS = 16
"""Tokens of the prompt from which the runner learns the slots of its caches."""


def load_cold(config: EngineConfig) -> MLXRunner:
    """Load a model as `load_runner` does, but time nothing and measure no costs: those of the runner are zero."""
    loader.use_device(config.device)
    runner = MLXRunner(loader.load(config, lambda progress: None), config)
    memory.set_limits(config)
    row = Row(EngineRequest("cold", np.zeros(NUM_TOKENS, np.int32), SamplingParams(1), ()))
    runner.prefill([row], NUM_TOKENS // 2)
    runner._a_snapshot = runner.snapshot([row])
    assert runner._a_snapshot is not None
    runner._prefill.learn_slots(runner._a_snapshot)
    runner.drop([row.id])
    return runner


@contextmanager
def cold_engines() -> Iterator[None]:
    """Let replicas that start meanwhile load their models with `load_cold`."""
    cold = partial(async_engine.AsyncEngine, make_runner=lambda config, progress: load_cold(config))
    with mock.patch.object(async_engine, "AsyncEngine", cold):
        yield
