"""Locks between real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import process_lock
from engine.process_lock import LockHeld, ProcessLock, holder_of

Holder = subprocess.Popen[str]


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


@pytest.mark.parametrize("platform, is_same", [("darwin", True), ("linux", False)])
def test_macos_finds_a_lock_after_it_has_renamed_the_machine(
    monkeypatch: pytest.MonkeyPatch, platform: str, is_same: bool
):
    monkeypatch.setattr(sys, "platform", platform)
    names = []
    for host in ("MacBook.local", "dhcp-12.example.org"):
        monkeypatch.setattr(process_lock.socket, "gethostname", lambda host=host: host)
        names.append(process_lock.lock_path("device-metal-0"))
    assert (names[0] == names[1]) is is_same


def test_a_free_lock_has_no_holder(tmp_path: Path):
    assert holder_of(tmp_path / "none.lock") is None
    lock = ProcessLock(tmp_path / "a.lock")
    assert f"process {os.getpid()} " in (holder_of(tmp_path / "a.lock") or "")
    lock.release()
    assert holder_of(tmp_path / "a.lock") is None
