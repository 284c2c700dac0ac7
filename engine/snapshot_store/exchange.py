"""SnapshotExchange: the server and the client by which one engine gives snapshots to other nodes and gets theirs."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.errors import EngineFailed
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.greeting import Identity
from engine.snapshot_store.snapshot_client import SnapshotClient
from engine.snapshot_store.snapshot_server import SnapshotServer
from engine.snapshot_store.wire import PeerTls
from engine.status import FetchStatus


@dataclass(frozen=True)
class Sharing:
    """How an engine shares snapshots with those of other nodes."""

    host: str
    """Address to listen on."""
    token: bytes = field(repr=False)
    """Secret of the cluster."""
    tls: PeerTls | None = None
    """This node's end of encrypted connections; None: they are not encrypted."""


class SnapshotExchange:
    """Listens, and fetches, until `close`.

    Args:
        files: The disk tier.
        sharing: Address and token.
        port: Port to listen on; 0 for any.
        fingerprint: Fingerprint of the model.
        write: See SnapshotServer.

    Attributes:
        client: Fetches snapshots.
        address: `host:port` at which other nodes find this one's.

    Raises:
        EngineFailed: The address cannot be used.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        sharing: Sharing,
        port: int,
        fingerprint: str,
        write: "Callable[[str], Future[bool]] | None" = None,
    ):
        self._files = files
        identity = Identity(sharing.token, fingerprint, sharing.tls)
        try:
            self._server = SnapshotServer(files, identity, sharing.host, port, write)
        except OSError as error:
            raise EngineFailed(
                f"prefix_cache.fetch_port: snapshots cannot be served at {sharing.host}, port {port}: {error}"
            ) from None
        self.address = self._server.address
        self.client = SnapshotClient(files, identity)

    @property
    def max_bytes(self) -> int:
        """Limit of the bytes of all files."""
        return self._files.max_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no other node is connected, and no prompt here waits for one."""
        return not self._server.status()["num_connections"] and not self.client.is_awaited

    def status(self) -> FetchStatus:
        """Return the counters of both directions since the start."""
        fetched, served = self.client.status(), self._server.status()
        return FetchStatus(
            address=self.address,
            num_fetched=fetched["num_fetched"],
            fetched_bytes=fetched["fetched_bytes"],
            fetched_s=1e-6 * fetched["fetched_us"],
            failures=self.client.failures(),
            num_served=served["num_served"],
            served_bytes=served["served_bytes"],
            num_refused=served["num_refused"],
            num_connections=served["num_connections"],
        )

    def close(self) -> None:
        """End all connections and stop listening."""
        self._server.close()
        self.client.close()
