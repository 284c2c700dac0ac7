"""Every family gives the same tokens on an emulated Mac, on its GPU and on its CPU, as on this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.metal.emulator import why_it_cannot_run
from tests.support.families import FAMILIES

pytestmark = pytest.mark.skipif(why_it_cannot_run() is not None, reason=str(why_it_cannot_run()))

ROOT = Path(__file__).parents[2]
GATE = ("qwen3_5", "mamba2", "rwkv7")
"""One family of each kind of kernel: the delta rule with M-RoPE, state-space layers, wkv7."""

REST = tuple(name for name in FAMILIES if name not in GATE)
SIZE = 10
"""Families of one process: the more, the less time is lost at its start."""

SETS = [
    GATE,
    *(
        pytest.param(
            REST[start : start + SIZE],
            marks=pytest.mark.night("the gate has a family of each kind of kernel; others use MLX's own"),
        )
        for start in range(0, len(REST), SIZE)
    ),
]


def tokens_on(device: str, directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.metal.zoo_run", device, str(directory), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("names", SETS, ids=lambda names: names[0])
def test_families_give_the_same_tokens_on_the_gpu_and_the_cpu_of_a_mac(
    request: pytest.FixtureRequest, names: tuple[str, ...], tmp_path: Path
):
    """On the CPU, whose kernels are MLX's own, the gate has one family."""
    expected = tokens_on("plain", tmp_path, names)
    assert all(isinstance(tokens, dict) for tokens in expected.values()), expected
    assert tokens_on("gpu", tmp_path, names) == expected
    on_cpu = names if request.config.option.night else names[:1]
    assert tokens_on("cpu", tmp_path, on_cpu) == {name: expected[name] for name in on_cpu}
