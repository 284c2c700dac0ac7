"""Machine-wide locks that one process holds until it ends, for a device or a port."""

import fcntl
import os
import socket
import sys
import time
from pathlib import Path

POLL_S = 0.1


class LockHeld(Exception):
    """Another process holds the lock. holder: that process, as 'process 123 (its command line)'."""

    def __init__(self, holder: str):
        super().__init__(holder)
        self.holder = holder


class ProcessLock:
    """An exclusive flock on a file, with the holder's pid and command line inside.

    The kernel releases it however the process ends, so there are no stale locks; the file itself stays. Child processes
    do not inherit the lock.
    """

    def __init__(self, path: Path, timeout_s: float = 0.0):
        """Take the lock.

        Args:
            path: File of the lock; created if missing.
            timeout_s: How long to wait for the lock.

        Raises:
            LockHeld: Another process holds it.
            OSError: The file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + timeout_s
        try:
            while not _try_lock(self._file):
                if time.monotonic() >= deadline:
                    raise LockHeld(_read_holder(self._file))
                time.sleep(POLL_S)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n{_command_line()}\n".encode(errors="replace"), 0)
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Release the lock; may be called several times."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1


def lock_path(name: str) -> Path:
    """Return the file of a lock in the user's cache.

    It contains the host name, as home directories may be shared. On macOS it does not: the system renames a machine
    when it joins another network, so that two processes would take different files; homes are on the Mac's own disk.
    """
    machine = "" if sys.platform == "darwin" else f"-{socket.gethostname()}"
    return Path.home() / ".cache" / "orchard" / f"{name}{machine}.lock"


def holder_of(path: Path) -> str | None:
    """Return the process that holds the lock, None without one. Does not take the lock and does not wait."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return None if _try_lock(file) else _read_holder(file)
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(file: int) -> str:
    pid, _, command = os.pread(file, 4096, 0).decode(errors="replace").partition("\n")
    return f"process {pid} ({command.strip()})" if pid else "another process"


def _command_line() -> str:
    return " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]])[:1000] if sys.argv else "python"
