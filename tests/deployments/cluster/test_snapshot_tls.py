"""Snapshots between nodes of a cluster with TLS: they arrive, and nodes without an admitted certificate get nothing."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cluster.ledger import revoke
from deployments.cluster.mutual_tls import MachineTls
from engine.snapshot_store import greeting
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import SnapshotMeta
from engine.snapshot_store.greeting import Identity
from engine.snapshot_store.snapshot_client import SnapshotClient
from engine.snapshot_store.snapshot_server import SnapshotServer
from engine.snapshot_store.wire import FRAME_BYTES
from tests.deployments.cluster.machines import HEAD
from tests.deployments.cluster.tls_machines import TlsHead, TlsMember
from tests.engine.snapshot_store.peers import TOKEN, Peers, bytes_of, fetch
from tests.engine.snapshot_store.snapshots import MODEL, SIZE, WAIT_S, arrays_of, meta_of


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    made.close()


@pytest.fixture
def there(peers: Peers) -> SnapshotFiles:
    return peers.files("there")


@pytest.fixture
def server(peers: Peers, there: SnapshotFiles, head: TlsHead) -> SnapshotServer:
    """On the head, with its certificate."""
    peers.open.append(SnapshotServer(there, Identity(TOKEN, MODEL, MachineTls(head.folder.tls)), HEAD))
    return peers.open[-1]  # type: ignore[return-value]


def client_of(peers: Peers, files: SnapshotFiles, tls: MachineTls | None) -> SnapshotClient:
    peers.open.append(SnapshotClient(files, Identity(TOKEN, MODEL, tls)))
    return peers.open[-1]  # type: ignore[return-value]


def saved(files: SnapshotFiles, size: int = SIZE) -> SnapshotMeta:
    meta = meta_of("turn")
    files.save(meta, arrays_of("turn", size))
    files.flush()
    return meta


def test_a_snapshot_of_several_frames_arrives(
    peers: Peers, there: SnapshotFiles, server: SnapshotServer, member: TlsMember
):
    meta = saved(there, 2 * FRAME_BYTES + 12345)
    client = client_of(peers, peers.files("here"), member.tls)
    fetched = fetch(client, server.address, meta)
    assert fetched.failure is None and fetched.num_bytes > 2 * FRAME_BYTES
    assert bytes_of(peers.path / "here") == bytes_of(peers.path / "there")


def test_a_revoked_node_and_one_without_tls_get_nothing(
    peers: Peers, there: SnapshotFiles, server: SnapshotServer, head: TlsHead, member: TlsMember,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(greeting, "GREETING_S", 1.0)
    meta, files = saved(there), peers.files("here")
    assert fetch(client_of(peers, files, None), server.address, meta).failure is not None
    client = client_of(peers, files, member.tls)
    revoke(head.folder, "127.0.0.1")
    assert fetch(client, server.address, meta).failure == "certificate"
    assert bytes_of(peers.path / "here") == {} and server.status()["num_served"] == 0
    until = time.monotonic() + WAIT_S
    while server.status()["num_refused"] < 2:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_fetch_that_waits_is_ended_from_another_thread(
    peers: Peers, there: SnapshotFiles, server: SnapshotServer, member: TlsMember
):
    meta, is_asked, may_answer = saved(there), threading.Event(), threading.Event()

    def slow(digest: str) -> None:
        is_asked.set()
        may_answer.wait(WAIT_S)

    server._write_missing = lambda digests: slow(digests[0])  # type: ignore[method-assign]
    server._files.chain_of = lambda digest: []  # type: ignore[method-assign]
    begun = client_of(peers, peers.files("here"), member.tls).fetch(
        server.address, meta.digest, meta.num_tokens, 1 << 40
    )
    assert is_asked.wait(WAIT_S)
    begun.stop()
    assert begun.done.result(WAIT_S).failure == "stopped"
    may_answer.set()
