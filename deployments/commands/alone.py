"""AloneServer: `orchard serve` on loopback with the head's configuration, on a machine whose head is silent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from deployments.cluster.folder import ClusterFolder, FolderError

CONFIG = "alone.yaml"
NOTE = "alone.json"
"""Process of the server, and when it was started."""
STOP_S = 60.0
"""Time for running answers, which get drain_timeout_s, and for Ray to end."""


class AloneServer:
    """The server, as a child of this process.

    Args:
        folder: Has what the head has told its members.
    """

    def __init__(self, folder: ClusterFolder):
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the server runs no longer."""
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        """Start it, and do not wait. Raises FolderError: the head's configuration is not known."""
        file = self._folder.path / CONFIG
        self._folder.write(file, json.dumps(on_loopback(shared_config(self._folder)), indent=2) + "\n")
        self._process = subprocess.Popen(self.command(file), stdin=subprocess.DEVNULL, start_new_session=True)
        started_s = psutil.Process(self._process.pid).create_time()
        self._folder.write(self._folder.path / NOTE, json.dumps([self._process.pid, started_s]) + "\n")

    def command(self, config: Path) -> list[str]:
        """Return the command of the server with a configuration."""
        return [str(Path(sys.executable).parent / "orchard"), "serve", "--config", str(config), "--no-dashboard"]

    def stop(self) -> None:
        """End it; running answers get the time that they get at any stop."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def end_leftover(folder: ClusterFolder) -> None:
    """End the server of a member process that was killed, if it still runs."""
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid, started_s = json.loads((folder.path / NOTE).read_text())
        process = psutil.Process(pid)
        if process.create_time() == started_s:
            process.terminate()
            psutil.wait_procs([process], STOP_S)


def shared_config(folder: ClusterFolder) -> dict[str, Any]:
    """Return the configuration of the head as it was told last. Raises FolderError."""
    try:
        return json.loads(folder.shared.read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{folder.shared}, the head's configuration, cannot be read: {error!r}") from None


def on_loopback(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for a server of this machine alone."""
    return {**config, "http_options": {**config.get("http_options", {}), "host": "127.0.0.1"}}


def note_of_ray(environ: Mapping[str, str]) -> Path:
    """Return the file in which `ray start` notes its cluster (ray 2.60.0, _common/utils.py, get_ray_address_file)."""
    system = environ.get("TMPDIR", "/tmp") if sys.platform.startswith("linux") else "/tmp"
    return Path(environ.get("RAY_TMPDIR", system)) / "ray" / "ray_current_cluster"
