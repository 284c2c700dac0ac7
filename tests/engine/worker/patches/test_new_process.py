"""A family that needs a patch when it is built gets it in a process in which nothing was loaded before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.families import FAMILIES
from tests.support.zoo import conversation, load, make

PROGRAM = """
import json
import sys

import engine.worker
import numpy as np
from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver

runner = load_cold(EngineConfig(model=sys.argv[1]))
driver = Driver(runner)
prompt, num_tokens = np.array(json.loads(sys.argv[2]), np.int32), int(sys.argv[3])
driver.run({0: [EngineRequest("row", prompt, SamplingParams(num_tokens, temperature=0.0), ())]})
print(json.dumps(driver.tokens["row"]))
"""


@pytest.mark.parametrize("family", ["glm_moe_dsa", "recurrent_gemma"])
def test_first_model_of_a_process_gives_the_same_tokens(family, tmp_path: Path):
    path = make(tmp_path / "model", FAMILIES[family])
    turn = conversation(load(path))["first"]
    arguments = [str(path), json.dumps(turn.token_ids), str(len(turn.answer.tokens))]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == turn.answer.tokens
