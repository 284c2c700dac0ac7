"""StoreProcess: the store of Ray's GCS in a process of its own, which ends with this one."""

import secrets
import subprocess
import sys
from pathlib import Path

STOP_S = 10.0


class StoreNotStarted(Exception):
    """The store does not start; the message is for the operator."""


class StoreProcess:
    """The process. Its log is read and its port known once it is made.

    Attributes:
        password: What the GCS must send; made for each process.
        address: HOST:PORT, on loopback.
    """

    def __init__(self, log: Path):
        """Start the store of a log. Raises StoreNotStarted."""
        self.password = secrets.token_hex(32)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cluster.gcs_store", str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self.password}\n")
        self._process.stdin.flush()
        port = self._process.stdout.readline().strip()
        if not port:
            assert self._process.stderr is not None
            reason = self._process.stderr.read().strip()
            self.stop()
            raise StoreNotStarted(reason)
        self.address = f"127.0.0.1:{port}"

    @property
    def has_ended(self) -> bool:
        """Whether the process runs no longer."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the process; the GCS must have ended before."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
