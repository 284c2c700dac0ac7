"""Terminal: runs a program on a pseudo-terminal and types into it, as its user does."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROWS, COLUMNS = 50, 160
QUIET_S = 2.0
"""A screen that has not changed for so long waits for its user."""
ESCAPE = re.compile(r"\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)|[\[(][0-?]*[ -/]*[@-~]|[=>78])")


class Terminal:
    """A program whose screen is read all the time, since one whose output is not read stands still.

    Attributes:
        shown: Everything that it has written, with escape sequences.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

        def control() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=control,
        )
        os.close(slave)
        self.shown = ""
        self._changed = time.monotonic()

    @property
    def text(self) -> str:
        """The output without escape sequences. Spaces may be missing, as screens move the cursor instead."""
        return ESCAPE.sub("", self.shown)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until a condition holds and the screen is quiet. False: not before `deadline` (monotonic)."""
        while time.monotonic() < deadline:
            self._read(0.2)
            if condition() and time.monotonic() - self._changed > QUIET_S:
                return True
            if self._process.poll() is not None:
                return condition()
        return False

    def exit_code(self, deadline: float) -> int | None:
        """Wait until the program ends; None if it has not before `deadline`, and is killed."""
        while self._process.poll() is None and time.monotonic() < deadline:
            self._read(0.2)
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._master)
        return code

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return
        with contextlib.suppress(OSError):  # EIO: the program has closed its terminal
            if chunk := os.read(self._master, 65536):
                self.shown += chunk.decode(errors="replace")
                self._changed = time.monotonic()
                return
        time.sleep(timeout_s)
