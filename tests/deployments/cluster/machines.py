"""Machines of a cluster without Ray: addresses of loopback, on which the head and its members talk to one another."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.gcs_store import GcsStore
from deployments.cluster.head_service import HeadService
from deployments.cluster.head_watch import HEAD_PATH, HeadWatch
from deployments.cluster.headship import Headship
from deployments.cluster.join_server import JoinServer
from deployments.cluster.members import Report
from deployments.cluster.proof_server import ProofServer

TOKEN = "the token of the cluster"
HEAD, FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
CLUSTER = "id of the cluster"
SHARED: dict[str, Any] = {
    "started": {"address": HEAD, "application": {"args": 1}, "serve": {}, "term": 1},
    "config": {"applications": [], "http_options": {"host": "0.0.0.0", "port": 8000}},
}


def choose_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the fixed ports by free ones; skip where loopback has one address only."""
    for name in ("JOIN", "MEMBER", "GCS", "RELAY"):
        try:
            with socket.create_server((HEAD, 0)) as probe:
                monkeypatch.setattr(ports, name, probe.getsockname()[1])
        except OSError:
            pytest.skip(f"{HEAD} is no address of this machine")


class HeadMachine:
    """A head: its store, and what answers the members."""

    def __init__(self, directory: Path, address: str = HEAD, term: int = 1):
        self.folder = ClusterFolder(directory)
        self.folder.make()
        self.folder.write_token(TOKEN)
        self._is_stopped = False
        self.store = GcsStore(self.folder.store_log, "password")
        self.adopted_by: list[Headship] = []
        self.service = HeadService(
            self.folder, Headship(address, term), CLUSTER, lambda: SHARED, self.adopted_by.append
        )
        self.server = JoinServer(address, ports.JOIN, TOKEN, dict, self.service.answers())
        self.server.start()

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self.server.stop()
        self.service.close()
        self.store._log.close()
        self.store._lock.release()


class MemberMachine:
    """A member, whose clock ticks when it is told to."""

    def __init__(self, directory: Path, address: str, joined_s: float = 1.0):
        self.folder = ClusterFolder(directory)
        self.folder.make()
        self.folder.write_token(TOKEN)
        self.heads: list[Headship] = []
        report = Report(address, f"node of {address}", joined_s, None)
        self.watch = HeadWatch(self.folder, TOKEN, Headship(HEAD, 1), lambda: report, self.heads.append)
        self.server = ProofServer(address, ports.MEMBER, TOKEN, {HEAD_PATH: self.watch.answer})
        self.server.start()

    def be_silent(self, seconds: float) -> None:
        """Let the head be silent for so long already."""
        self.watch._heard = time.monotonic() - seconds

    def stop(self) -> None:
        self.server.stop()
