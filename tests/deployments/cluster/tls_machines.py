"""A head with TLS, and machines that have joined it, on loopback and without Ray."""

from functools import partial
from pathlib import Path

from deployments.cluster import ports
from deployments.cluster.append_log import MAGIC
from deployments.cluster.facts import read_facts
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.head_service import HeadService
from deployments.cluster.head_watch import HeadWatch
from deployments.cluster.headship import Headship
from deployments.cluster.join_client import HeadClient, enrol, guest_client
from deployments.cluster.join_server import JoinServer
from deployments.cluster.join_token import JoinToken, read_join_token
from deployments.cluster.members import Report
from deployments.cluster.model_files import ModelSource
from deployments.cluster.mutual_tls import MachineTls, machine_tls
from deployments.cluster.proof_client import ProofClient
from deployments.serve_run.head_secrets import guest_secret, head_secrets
from tests.deployments.cluster.machines import CLUSTER, HEAD, SHARED

MEMBER = "127.0.0.1"
"""From which every connection on loopback comes."""
GCS = f"{HEAD}:6379"


class TlsHead:
    """A head, with an empty log."""

    def __init__(self, directory: Path):
        self.models: list[tuple[str, str | None]] = []
        self.folder = ClusterFolder(directory)
        self.folder.make()
        secrets = head_secrets(self.folder, HEAD, has_tls=True)
        self.folder.store_log.write_bytes(MAGIC)
        self.service = HeadService(self.folder, Headship(HEAD, 1), CLUSTER, lambda: SHARED, lambda headship: None)
        self.server = JoinServer(
            HEAD,
            ports.JOIN,
            secrets.token,
            self._facts,
            {**self.service.answers(), **ModelSource(lambda: self.models).answers()},
            secrets.tls,
            secrets.authority,
            partial(guest_secret, self.folder),
        )
        self.server.start()

    def _facts(self) -> dict[str, object]:
        facts = read_facts([]).as_json()
        return {
            "facts": facts,
            "gcs": GCS,
            "url": "http://127.0.0.1:8000",
            "resources": {"mlx": 1.0},
            "engines_per_node": "all",
            "device": "auto",
            "term": 1,
        }

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return f"{HEAD}:{self.server.port}"

    @property
    def join_token(self) -> JoinToken:
        """Return what it prints."""
        token = read_join_token(self.folder)
        assert token is not None
        return token

    def join(self, directory: Path) -> "TlsMember":
        """Let a machine join, as `orchard join` does before it starts Ray."""
        folder, token = ClusterFolder(directory), self.join_token
        head = guest_client(self.address, token)
        head.facts()
        enrol(folder, head, token, MEMBER)
        return TlsMember(folder)

    def stop(self) -> None:
        """Stop the server."""
        self.server.stop()
        self.service.close()


class TlsMember:
    """A machine that has joined."""

    def __init__(self, folder: ClusterFolder):
        self.folder = folder
        tls = machine_tls(folder)
        assert tls is not None
        self.tls: MachineTls = tls

    def client(self, host: str = HEAD, port: int | None = None) -> ProofClient:
        """Return what it asks a machine with."""
        return ProofClient(host, port or ports.JOIN, self.folder.token(), 5.0, self.tls)

    def head_client(self, head: TlsHead) -> HeadClient:
        """Return what it asks the head with to join again."""
        return HeadClient(head.address, self.folder.token(), tls=self.tls)

    def watch(self) -> HeadWatch:
        """Return its view of the head."""
        report = Report(MEMBER, "its node", 1.0, None)
        return HeadWatch(
            self.folder, self.folder.token(), Headship(HEAD, 1), lambda: report, lambda headship: None, self.tls
        )
