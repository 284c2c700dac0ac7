"""The self-test passes on an emulated Mac and reaches the library's kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.metal.emulator import why_it_cannot_run

pytestmark = pytest.mark.skipif(why_it_cannot_run() is not None, reason=str(why_it_cannot_run()))

ROOT = Path(__file__).parents[2]

CHECKS = """
import json, sys
from pathlib import Path
from tests.metal import emulator
emulator.install(Path(sys.argv[1]), on_gpu=True)
from engine.worker import patches
from engine.worker.kernel_checks import KERNEL_CHECKS
patches.install(decodes=True)
figures = {name: check() for name, check in KERNEL_CHECKS.items()}
print(json.dumps([{name: figure if isinstance(figure, str) else vars(figure) for name, figure in figures.items()},
                  emulator.num_calls]))
"""


OF_CUDA = (
    "products of few rows, 4 and 8 bits",
    "products of experts",
    "decoder layers, same bits",
    "attention of decode steps",
    "attention of prompts",
    "cache of CUDA kernels",
)
"""Checks of kernels that Metal does not have."""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.night("g++ compiles dozens of kernels; in the gate families of the zoo run those of their layers")
def test_the_checks_of_kernels_pass_and_reach_those_of_metal(tmp_path: Path):
    """MLX's own products of single tokens, the CPU's here, add up in bfloat16: the verifier cannot have their bits."""
    figures, num_calls = json.loads(run("-c", CHECKS, str(tmp_path)))
    for name, figure in figures.items():
        if name in OF_CUDA:
            assert isinstance(figure, str) and "CUDA alone" in figure, (name, figure)
            continue
        assert isinstance(figure, dict), (name, figure)
        assert figure["value"] <= figure["limit"] or not figure["is_wrong"], (name, figure)
    for kernel in ("gated_delta_step", "with_states", "mrope", "quantized_verify_affine_qmv", "affine_fused_qmv"):
        assert any(kernel in name for name in num_calls), (kernel, num_calls)


@pytest.mark.night("it takes minutes; the gate runs the checks of kernels, and the zoo's tokens")
def test_the_whole_self_test_passes_and_warns_of_the_bits_of_the_verifier_alone(tmp_path: Path):
    output = run("-m", "tests.metal.self_test_run", str(tmp_path), "--quick", "--dtype", "float32")
    assert f" 1 WARN, 0 FAIL, {len(OF_CUDA)} SKIP" in output, output
    lines = [line.strip() for line in output.split("\n")]
    assert all("exact verifier" in line for line in lines if line.startswith("WARN")), output
    assert all("CUDA alone" in line for line in lines if line.startswith("SKIP")), output
    num_calls = json.loads(output.strip().split("\n")[-1])
    assert any("gated_delta" in name for name in num_calls), num_calls
