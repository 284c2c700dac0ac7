"""Locks between real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import device_lock
from engine.config import EngineConfig
from engine.device_lock import device_refusal, lock_device
from engine.process_lock import LockHeld, ProcessLock, holder_of
from engine.protocol import EngineFailed
from engine.worker import loader, model_runner

ROOT = Path(__file__).parents[2]

HOLD = """
import sys
from pathlib import Path
from engine.process_lock import ProcessLock

lock = ProcessLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

Holder = subprocess.Popen[str]


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Holder]]:
    """hold(path): another process that has the lock."""
    holders: list[Holder] = []

    def start(path: Path) -> Holder:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        holders.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.wait(30)
        for pipe in (holder.stdin, holder.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(device_lock, "TIMEOUT_S", 0.0)
    return tmp_path


def test_a_lock_of_another_process_is_refused_with_its_pid(tmp_path: Path, hold: Callable[[Path], Holder]):
    path = tmp_path / "a.lock"
    holder = hold(path)
    with pytest.raises(LockHeld, match=rf"^process {holder.pid} \("):
        ProcessLock(path)
    assert (holder_of(path) or "").startswith(f"process {holder.pid} ")


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path, hold: Callable[[Path], Holder]):
    path = tmp_path / "a.lock"
    holder = hold(path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(30)
    holder.wait(10)
    assert holder_of(path) is None
    ProcessLock(path).release()


def test_a_lock_that_is_released_in_time_is_waited_for(tmp_path: Path, hold: Callable[[Path], Holder]):
    path = tmp_path / "a.lock"
    holder = hold(path)
    assert holder.stdin is not None
    holder.stdin.close()
    ProcessLock(path, timeout_s=30.0).release()


def test_a_process_that_the_holder_starts_does_not_keep_the_lock(tmp_path: Path):
    path = tmp_path / "a.lock"
    lock = ProcessLock(path)
    code = "import os; print([fd for fd in os.listdir('/dev/fd') if os.path.exists(f'/dev/fd/{fd}') " + (
        f"and os.path.samefile(f'/dev/fd/{{fd}}', {str(path)!r})])"
    )
    inherited = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
    assert (inherited.stdout, inherited.stderr) == ("[]\n", "")
    lock.release()
    lock.release()
    assert holder_of(path) is None


def test_a_free_lock_has_no_holder(tmp_path: Path):
    assert holder_of(tmp_path / "none.lock") is None
    lock = ProcessLock(tmp_path / "a.lock")
    assert f"process {os.getpid()} " in (holder_of(tmp_path / "a.lock") or "")
    lock.release()
    assert holder_of(tmp_path / "a.lock") is None


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
    monkeypatch.setattr(loader, "device_kind", lambda: "metal")
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
