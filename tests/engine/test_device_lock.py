"""One engine per GPU: the lock of a device between real processes."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import device_lock
from engine.config import EngineConfig
from engine.device_lock import device_refusal, lock_device
from engine.errors import EngineFailed
from engine.process_lock import holder_of
from engine.worker import devices, loader, model_runner

Holder = subprocess.Popen[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(device_lock, "TIMEOUT_S", 0.0)
    return tmp_path


def device_path(kind: str) -> Path:
    return device_lock.lock_path(device_lock._name(kind))


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_second_engine_on_a_gpu_is_refused_with_the_pid_of_the_first(
    home: Path, hold: Callable[[Path], Holder], kind: str
):
    device_path(kind).parent.mkdir(parents=True)
    holder = hold(device_path(kind))
    with pytest.raises(EngineFailed, match=rf"{kind} GPU is in use by an engine in process {holder.pid} .*share_"):
        lock_device(kind, share_device=False, timeout_s=0.0)
    assert f"process {holder.pid} " in (device_refusal("auto", share_device=False) or "")
    assert device_refusal("cpu", share_device=False) is None
    assert device_refusal("auto", share_device=True) is None
    assert lock_device(kind, share_device=True) is None


def test_engines_on_a_cpu_need_no_lock(home: Path):
    assert lock_device("cpu", share_device=False) is None
    assert not (home / ".cache").exists()


def test_engines_on_different_gpus_do_not_exclude_each_other(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    first = lock_device("cuda", share_device=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    second = lock_device("cuda", share_device=False, timeout_s=0.0)
    assert first is not None and second is not None
    first.release()
    second.release()


def test_an_engine_locks_the_gpu_before_loading_weights_and_releases_it_on_failure(
    home: Path, hold: Callable[[Path], Holder], monkeypatch: pytest.MonkeyPatch
):
    """The kind of the device is all that is not real here: there is no GPU on most machines that test."""
    monkeypatch.setattr(devices, "device_kind", lambda: "metal")
    loaded = []

    def load(config: EngineConfig, progress: Callable[[float], None]) -> None:
        loaded.append(holder_of(device_path("metal")))
        raise EngineFailed("no weights")

    monkeypatch.setattr(loader, "load", load)
    with pytest.raises(EngineFailed, match="no weights"):
        model_runner.load_runner(EngineConfig(), lambda progress: None)
    assert f"process {os.getpid()} " in (loaded[0] or "")
    holder = hold(device_path("metal"))
    with pytest.raises(EngineFailed, match=f"process {holder.pid} "):
        model_runner.load_runner(EngineConfig(), lambda progress: None)
    with pytest.raises(EngineFailed, match="no weights"):
        model_runner.load_runner(EngineConfig(share_device=True), lambda progress: None)
    assert len(loaded) == 2
