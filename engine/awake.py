"""Keeps a Mac from sleeping while requests run; other systems do not sleep by themselves."""

import logging
import os
import subprocess
import sys

log = logging.getLogger("orchard.engine")

CAFFEINATE = ["/usr/bin/caffeinate", "-i", "-s"]
"""No idle sleep, and no system sleep on mains power; the display may sleep."""


class Awake:
    """Holds the assertion of a `caffeinate` that ends with this process, however it ends.

    Args:
        command: Of the program, to which `-w PID` is added; None where there is none.
    """

    def __init__(self, command: list[str] | None = CAFFEINATE if sys.platform == "darwin" else None):
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self, is_busy: bool) -> None:
        """Hold the assertion while requests run, and release it when none does. Logs once if it cannot be held."""
        if is_busy and self._process is None and self._command is not None:
            try:
                self._process = subprocess.Popen(
                    [*self._command, "-w", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                log.warning("the machine may sleep while requests run: %s", error)
                self._command = None
        elif not is_busy and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
