"""Runners of tiny checkpoints, loaded once for each module of tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.dflash import write_dflash
from tests.support.families import FAMILIES
from tests.support.gemma4_assistant import write_assistant
from tests.support.zoo import make as make_zoo


@pytest.fixture(scope="module")
def runner_of(
    tiny_model: Callable[..., Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], MLXRunner]:
    """Load a model of the module's MODELS by its name; the one named `compiled` has a compiled step, that named
    `drafter` a DFlash drafter in the place of its head. `assistant` is Gemma 4 with its assistant.

    They are never closed: that would take the main thread's streams from the tests that follow.
    """
    loaded: dict[str, MLXRunner] = {}

    def make(name: str) -> MLXRunner:
        if name in ("demo", "text"):
            return request.getfixturevalue("runner" if name == "demo" else "text_runner")
        if name not in loaded:
            compiles = {"compile": "on"} if name == "compiled" else {}
            if name == "assistant":
                model = make_zoo(tmp_path_factory.mktemp("zoo") / "model", replace(FAMILIES["gemma4_text"], seed=1))
                write_assistant(model)
            else:
                model = tiny_model(**request.module.MODELS[name])
            drafts = {"mtp_head": str(write_dflash(model))} if name == "drafter" else {}
            loaded[name] = load_cold(EngineConfig.model_validate({"model": str(model), **compiles, **drafts}))
        return loaded[name]

    return make


@pytest.fixture
def tiny(runner_of: Callable[[str], MLXRunner]) -> MLXRunner:
    return runner_of("alternating")
