"""On the CPU device of a Mac the libraries' modules do not use Metal's kernels; tests/metal runs models there."""

import inspect
import subprocess
import sys
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker import loader
from engine.worker.patches.metal_on_cpu import LIBRARY, MODULES, ON_CPU

ON_A_MACS_CPU = """
from pathlib import Path
from tests.metal import emulator
emulator.install(Path("unused"), on_gpu=False)
from engine.worker import loader
loader.use_device("auto")
import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import exact_speculative_verify as verify
from mlx_vlm.models.nemotron_labs_diffusion import language as nemotron
from mlx_vlm.quantization.one_bit import OneBitLinear

linear, x = nn.Linear(64, 64, bias=False), mx.ones((1, 2, 64))
assert nemotron._small_row_linear(linear, x, 8) is None
assert nemotron._small_row_swiglu(linear, linear, x, 8) is None
assert verify.exact_speculative_verify_weight(linear.weight, x) is None
assert verify.exact_speculative_verify_switch_weight(linear.weight[None], x, mx.zeros((1, 2, 1), mx.int32)) is None
for num_tokens in (1, 20):
    assert mx.array_equal(OneBitLinear(512, 64)(mx.ones((1, num_tokens, 512))), mx.zeros((1, num_tokens, 64)))
linear.set_dtype(mx.bfloat16)
assert nemotron._bm32_linear(linear, mx.ones((1, 32, 64), mx.bfloat16)) is None
"""


class Device:
    """A stand-in for MLX's default device."""

    def __init__(self, kind: mx.DeviceType):
        self.type = kind


@pytest.mark.parametrize("kind, has_kernels", [(mx.DeviceType.cpu, False), (mx.DeviceType.gpu, True)])
def test_only_the_gpu_of_a_mac_has_kernels(monkeypatch: pytest.MonkeyPatch, kind: mx.DeviceType, has_kernels: bool):
    for module in MODULES:
        monkeypatch.setattr(module, "_HAS_METAL", True)
    kernels = {of: object() for of in LIBRARY}
    for (module, name), kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
        monkeypatch.setitem(LIBRARY, (module, name), kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: Device(kind))
    loader.use_device("auto")
    assert [module._HAS_METAL for module in MODULES] == [has_kernels] * len(MODULES)
    assert {(module, name): getattr(module, name) for module, name in kernels} == (kernels if has_kernels else ON_CPU)


def test_functions_of_the_libraries_compute_without_kernels_there():
    run = subprocess.run(
        [sys.executable, "-c", ON_A_MACS_CPU], cwd=Path(__file__).parents[4], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_the_libraries_still_ask_whether_there_is_metal_and_not_for_the_device():
    for module in {*MODULES, *(module for module, name in ON_CPU)}:
        source = inspect.getsource(module)
        assert "mx.metal.is_available()" in source and "default_device" not in source, module
