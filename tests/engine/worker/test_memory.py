"""Limits of the device's memory: a Mac's GPU shares the machine's."""

from types import SimpleNamespace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import psutil
import pytest

from engine import host_memory
from engine.config import EngineConfig
from engine.worker import memory

GIB = 2**30


class GPU:
    """A stand-in for MLX's default device."""

    type = mx.DeviceType.gpu


def pretend(monkeypatch: pytest.MonkeyPatch, total_gib: int, info: dict[str, int], is_metal: bool) -> None:
    """Pretend that this machine has so much memory and a GPU of this kind."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total_gib * GIB))
    monkeypatch.setattr(mx, "default_device", GPU)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_metal)


@pytest.mark.parametrize(
    "total, recommended, limit",
    [(8, 5.3, 4), (16, 10.7, 8), (24, 16, 16), (32, 21.3, 21.3), (64, 48, 48), (128, 96, 96)],
)
def test_a_small_mac_keeps_half_of_its_memory_or_8_gib_for_everything_else(monkeypatch, total, recommended, limit):
    pretend(monkeypatch, total, {"max_recommended_working_set_size": int(recommended * GIB)}, is_metal=True)
    assert memory.default_limit_bytes() == int(limit * GIB)


def test_a_gpu_with_memory_of_its_own_gives_all_of_it(monkeypatch):
    pretend(monkeypatch, 8, {"total_memory": 80 * GIB}, is_metal=False)
    assert memory.default_limit_bytes() == 80 * GIB


@pytest.mark.parametrize(
    "platform, total, configured, cache_mb",
    [
        ("darwin", 16, None, 512), ("darwin", 24, None, 2048), ("linux", 8, None, 2048),
        ("darwin", 16, 1000, 1000), ("darwin", 16, 0, 0),
    ],
)  # fmt: skip
def test_a_small_mac_keeps_fewer_freed_buffers_unless_it_is_configured(
    monkeypatch, platform, total, configured, cache_mb
):
    limits: list[int] = []
    pretend(monkeypatch, total, {}, is_metal=True)
    monkeypatch.setattr(host_memory.sys, "platform", platform)
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    memory.set_limits(EngineConfig(mlx_cache_mb=configured))
    assert limits == [cache_mb * 2**20]
