"""A compiled step gives the tokens of forwards without any state, in every family that has one."""

from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.fast_paths import COLUMNS, DOCUMENT
from tests.support.zoo import conversation, load, make


def compiled_families() -> list[str]:
    """Return the families that have a compiled step by engine/FAST_PATHS.md, which follows from the code."""
    place = list(COLUMNS).index("compiled_step") + 1
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    found = [row[0].strip("`") for row in rows if row[place] == "yes"]
    assert found, f"no family in {DOCUMENT.name} has a compiled step"
    return found


@pytest.mark.parametrize("family", compiled_families())
def test_a_compiled_step_gives_the_tokens_of_forwards_without_any_state(family: str, tmp_path: Path):
    """Plain steps of one row and of three, that end at different times."""
    turns = conversation(load(make(tmp_path, FAMILIES[family])))
    runner = load_cold(EngineConfig.model_validate({"model": str(tmp_path), "compile": "on"}))
    requests = [
        EngineRequest(name, np.array(turn.token_ids, np.int32), SamplingParams(len(turn.answer.tokens), 0.0), ())
        for name, turn in turns.items()
    ]
    alone, together = (Driver(runner, EngineConfig(prompt_lookup="off", mtp="off")) for _ in range(2))
    for request in requests:
        alone.run({0: [request]})
    together.run({0: requests})
    for name, turn in turns.items():
        assert alone.tokens[name] == together.tokens[name] == turn.answer.tokens, name
    assert runner.capabilities["compiled"] is True
