"""On the CPU device of a Mac the libraries' modules do not use Metal's kernels; tests/metal runs models there."""

import inspect

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker import loader
from engine.worker.patches.metal_on_cpu import MODULES


class Device:
    """A stand-in for MLX's default device."""

    def __init__(self, kind: mx.DeviceType):
        self.type = kind


@pytest.mark.parametrize("kind, has_kernels", [(mx.DeviceType.cpu, False), (mx.DeviceType.gpu, True)])
def test_only_the_gpu_of_a_mac_has_kernels(monkeypatch: pytest.MonkeyPatch, kind: mx.DeviceType, has_kernels: bool):
    for module in MODULES:
        monkeypatch.setattr(module, "_HAS_METAL", True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: Device(kind))
    loader.use_device("auto")
    assert [module._HAS_METAL for module in MODULES] == [has_kernels] * len(MODULES)


def test_the_libraries_still_ask_whether_there_is_metal_and_not_for_the_device():
    for module in MODULES:
        assert "\n_HAS_METAL = mx.metal.is_available()\n" in inspect.getsource(module)
