"""Snapshots between two nodes over real sockets: the same bytes arrive, or a failure is counted and nothing changes."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.snapshot_store import greeting, snapshot_server, wire
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import SnapshotMeta
from engine.snapshot_store.greeting import Identity
from engine.snapshot_store.snapshot_server import SnapshotServer
from engine.snapshot_store.wire import FRAME_BYTES, Channel, FrameKind, PeerError
from tests.engine.snapshot_store.peers import TOKEN, Peers, bytes_of, cut_at, fetch, flip_at
from tests.engine.snapshot_store.snapshots import (
    MODEL,
    OTHER_MODEL,
    SIZE,
    WAIT_S,
    arrays_of,
    assert_same_arrays,
    digest_of,
    load,
    meta_of,
    path_of,
    save,
)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    made.close()


def save_chain(files: SnapshotFiles, *names: str) -> list[SnapshotMeta]:
    chain: list[SnapshotMeta] = []
    for name in names:
        chain.append(save(files, name, chain[-1] if chain else None))
    files.flush()
    return chain


def test_a_chain_arrives_with_the_bytes_of_its_files(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn", "answer")
    server, client = peers.serve(there), peers.client(here)
    fetched = fetch(client, server.address, chain[-1])
    assert (fetched.failure, fetched.num_snapshots) == (None, 3)
    assert bytes_of(peers.path / "here") == bytes_of(peers.path / "there")
    assert [meta.digest for meta in reversed(here.entries())] == [meta.digest for meta in chain]
    assert_same_arrays(load(here, chain[-1]), arrays_of("answer", SIZE))
    assert client.status()["fetched_bytes"] == fetched.num_bytes > 3 * SIZE
    deadline = time.monotonic() + 60  # the server counts a file after its last part, which the client may have by then
    while server.status()["num_served"] < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.status()["served_bytes"] == fetched.num_bytes
    assert (client.status()["num_fetched"], server.status()["num_served"], client.failures()) == (3, 3, {})


def test_only_the_part_of_a_chain_that_is_missing_is_transferred(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn", "answer")
    save_chain(here, "root", "turn")
    fetched = fetch(peers.client(here), peers.serve(there).address, chain[-1])
    assert (fetched.failure, fetched.num_snapshots) == (None, 1)


def test_a_file_of_many_frames_arrives(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta = meta_of("large")
    there.save(meta, arrays_of("large", 3 * FRAME_BYTES + 5))
    there.flush()
    assert fetch(peers.client(here), peers.serve(there).address, meta).failure is None
    assert_same_arrays(load(here, meta), arrays_of("large", 3 * FRAME_BYTES + 5))


def test_a_fetched_snapshot_survives_a_restart(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn")
    assert fetch(peers.client(here), peers.serve(there).address, chain[-1]).failure is None
    here.close(WAIT_S)
    assert_same_arrays(load(peers.files("here"), chain[-1]), arrays_of("turn", SIZE))


def test_a_snapshot_that_is_still_queued_for_writing_is_waited_for(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta = save(there, "root")
    assert fetch(peers.client(here), peers.serve(there).address, meta).failure is None


def test_a_snapshot_in_memory_is_written_on_demand(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta = meta_of("root")

    def write(digest: str) -> "Future[bool]":
        done: Future[bool] = Future()
        done.set_result(there.save(meta, arrays_of("root", SIZE)))
        return done

    assert fetch(peers.client(here), peers.serve(there, write=write).address, meta).failure is None


# Wrong greetings


@pytest.mark.parametrize(
    "other, reason",
    [
        ({"token": b"another"}, "token"),
        ({"fingerprint": OTHER_MODEL}, "fingerprint"),
    ],
)
def test_a_node_of_another_cluster_or_model_is_refused_with_the_reason(peers: Peers, other, reason) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta = save_chain(there, "root")[0]
    server, client = peers.serve(there), peers.client(here, **other)
    assert fetch(client, server.address, meta).failure == reason
    assert client.failures() == {reason: 1}
    wait_for_the_end_of_connections(server)
    assert server.status()["num_refused"] == 1
    assert here.entries() == [] and server.status()["num_served"] == 0


@pytest.mark.parametrize("name, value, reason", [("VERSION", 2, "version"), ("FORMAT", "other", "format")])
def test_another_version_or_format_is_refused_with_the_reason(peers, monkeypatch, name, value, reason) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta, server = save_chain(there, "root")[0], peers.serve(there)

    def greet_as_other(channel: Channel, identity: Identity) -> None:
        opening = channel.receive_bytes(greeting._OPENING.size)
        version = value if name == "VERSION" else greeting.VERSION
        form = value if name == "FORMAT" else greeting.FORMAT
        claim = greeting._CLAIM.pack(
            greeting.MAGIC, version, bytes(32), greeting._digest(form), greeting._digest(identity.fingerprint)
        )
        channel.send_bytes(claim + identity.proof(b"client", opening + claim))
        verdict = channel.receive_bytes(33)[0]
        raise PeerError(greeting.VERDICTS[verdict] or "protocol", "refused")

    monkeypatch.setattr("engine.snapshot_store.snapshot_client.greet", greet_as_other)
    assert fetch(peers.client(here), server.address, meta).failure == reason


def test_a_server_without_the_token_is_not_believed(peers: Peers) -> None:
    """It accepts every client, but cannot prove that it has the token."""
    here = peers.files("here")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            channel = Channel(listener.accept()[0])
            channel.send_bytes(greeting._OPENING.pack(greeting.MAGIC, greeting.VERSION, bytes(32)))
            channel.receive_bytes(greeting._CLAIM.size + 32)
            channel.send_bytes(bytes(33))
            channel.close()

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert fetch(peers.client(here), address, meta_of("root")).failure == "token"
        thread.join()


def test_the_token_is_not_sent(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta, sent = save_chain(there, "root")[0], bytearray()

    def record(data: bytes, num_before: int) -> bytes:
        sent.extend(data)
        return data

    relay = peers.relay(peers.serve(there).address, record)
    assert fetch(peers.client(here), relay.address, meta).failure is None
    assert TOKEN not in sent and MODEL.encode() in sent, "the file itself has passed"


# Transfers that fail


def length_of_transfer(peers: Peers, there: SnapshotFiles, meta: SnapshotMeta, address: str) -> int:
    relay = peers.relay(address, lambda data, num_before: data)
    assert fetch(peers.client(peers.files("whole")), relay.address, meta).failure is None
    return relay.num_passed


@pytest.mark.parametrize("share", [0.0, 0.0004, 0.001, 0.002, 0.005, 0.02, 0.3, 0.5, 0.7, 0.9, 0.9999])
def test_a_transfer_that_is_cut_leaves_complete_files_only(peers: Peers, share: float) -> None:
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn", "answer")
    address = peers.serve(there).address
    position = int(share * length_of_transfer(peers, there, chain[-1], address))
    client = peers.client(here)
    failed = fetch(client, peers.relay(address, cut_at(position)).address, chain[-1])
    assert failed.failure in ("cut", "busy") and client.failures() == {failed.failure: 1}
    assert len(here.entries()) == failed.num_snapshots < 3
    complete = fetch(client, address, chain[-1])
    assert (complete.failure, complete.num_snapshots) == (None, 3 - failed.num_snapshots)
    assert bytes_of(peers.path / "here") == bytes_of(peers.path / "there")


@pytest.mark.parametrize("share", [0.0, 0.0002, 0.001, 0.0015, 0.002, 0.004, 0.02, 0.3, 0.5, 0.7, 0.9, 0.9999])
def test_a_wrong_byte_is_found_before_the_file_is_taken_over(peers: Peers, share: float, monkeypatch) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.5)  # a wrong length waits for bytes that never come
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn", "answer")
    address = peers.serve(there).address
    position = int(share * length_of_transfer(peers, there, chain[-1], address))
    client = peers.client(here)
    failed = fetch(client, peers.relay(address, flip_at(position)).address, chain[-1])
    assert failed.failure in ("damaged", "protocol", "token", "version", "gone", "timeout", "cut", "mismatch")
    assert client.failures() == {failed.failure: 1}
    whole = bytes_of(peers.path / "there")
    assert all(whole[name] == data for name, data in bytes_of(peers.path / "here").items())


def test_nothing_listens(peers: Peers) -> None:
    client = peers.client(peers.files("here"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert fetch(client, address, meta_of("root")).failure == "unreachable"
    assert fetch(client, "no address", meta_of("root")).failure == "unreachable"


def test_a_server_that_is_silent_ends_as_a_timeout(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert fetch(peers.client(peers.files("here")), address, meta_of("root")).failure == "timeout"


def test_a_server_that_stops_within_a_file_ends_as_a_timeout(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.2)
    there, here = peers.files("there"), peers.files("here")
    meta, never = save_chain(there, "root")[0], threading.Event()

    def stall(data: bytes, num_before: int) -> bytes:
        if num_before + len(data) < 1000:
            return data
        never.wait(WAIT_S)
        return b""

    relay = peers.relay(peers.serve(there).address, stall)
    assert fetch(peers.client(here), relay.address, meta).failure == "timeout"
    never.set()


def test_a_snapshot_that_the_server_does_not_have_is_gone(peers: Peers) -> None:
    address = peers.serve(peers.files("there")).address
    assert fetch(peers.client(peers.files("here")), address, meta_of("root")).failure == "gone"


def test_a_file_that_was_removed_meanwhile_is_gone(peers: Peers) -> None:
    there = peers.files("there")
    chain = save_chain(there, "root", "turn")
    os.unlink(path_of(peers.path / "there", "turn"))
    fetched = fetch(peers.client(peers.files("here")), peers.serve(there).address, chain[-1])
    assert (fetched.failure, fetched.num_snapshots) == ("gone", 1)


def test_a_snapshot_with_other_tokens_than_expected_is_no_match(peers: Peers) -> None:
    there = peers.files("there")
    save_chain(there, "root")
    other = meta_of("root", num_tokens=17)
    assert fetch(peers.client(peers.files("here")), peers.serve(there).address, other).failure == "mismatch"


def test_a_damaged_file_of_the_server_is_found_when_it_is_read(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta, path = save_chain(there, "root")[0], path_of(peers.path / "there", "root")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fetch(peers.client(here), peers.serve(there).address, meta).failure is None
    with pytest.raises(Exception, match="damaged"):
        load(here, meta)
    assert here.entries() == []


def test_a_file_of_another_snapshot_is_not_taken_over(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta = save_chain(there, "root", "other")[0]
    size = path_of(peers.path / "there", "root").stat().st_size
    path_of(peers.path / "there", "root").write_bytes(
        path_of(peers.path / "there", "other").read_bytes()[:size].ljust(size, b"\0")
    )
    assert fetch(peers.client(here), peers.serve(there).address, meta).failure in ("mismatch", "damaged")
    assert here.entries() == []


def test_what_is_too_large_to_be_worth_it_is_not_transferred(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    chain = save_chain(there, "root", "turn")
    server = peers.serve(there)
    size = sum(file.num_bytes for file in there.chain_of(chain[-1].digest))
    client = peers.client(here)
    assert fetch(client, server.address, chain[-1], size - 1).failure == "slow"
    assert server.status()["served_bytes"] == 0
    assert fetch(client, server.address, chain[-1], size).failure is None


def test_what_does_not_fit_into_the_disk_tier_is_not_transferred(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here", max_bytes=2.5 * SIZE)
    chain = save_chain(there, "root", "turn", "answer")
    server = peers.serve(there)
    assert fetch(peers.client(here), server.address, chain[-1]).failure == "room"
    assert server.status()["served_bytes"] == 0


def test_fetched_files_evict_the_least_recently_used_ones(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here", max_bytes=2.5 * SIZE)
    chain = save_chain(there, "root", "turn")
    save_chain(here, "old")
    assert fetch(peers.client(here), peers.serve(there).address, chain[-1]).failure is None
    assert {meta.digest for meta in here.entries()} == {meta.digest for meta in chain}


def test_a_stopped_fetch_ends_and_leaves_no_file(peers: Peers) -> None:
    there, here = peers.files("there"), peers.files("here")
    meta, reached, go_on = save_chain(there, "root")[0], threading.Event(), threading.Event()

    def stall(data: bytes, num_before: int) -> bytes:
        if num_before + len(data) > 1000:
            reached.set()
            go_on.wait(WAIT_S)
        return data

    client = peers.client(here)
    running = client.fetch(
        peers.relay(peers.serve(there).address, stall).address, meta.digest, meta.num_tokens, 1 << 40
    )
    assert reached.wait(WAIT_S)
    running.stop()
    assert running.done.result(WAIT_S).failure == "stopped"
    go_on.set()
    assert os.listdir(peers.path / "here") == []


# Hostile clients


def wait_for_the_end_of_connections(server: SnapshotServer) -> None:
    while server.status()["num_connections"]:
        time.sleep(0.001)


def connected(address: str) -> Channel:
    return Channel(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))))


def greeted(address: str) -> Channel:
    channel = connected(address)
    try:
        greeting.greet(channel, Identity(TOKEN, MODEL))
    except PeerError:
        channel.close()
        raise
    return channel


def ended(channel: Channel) -> str:
    with pytest.raises(PeerError) as error:
        channel.receive(1 << 20, WAIT_S)
    channel.close()
    return error.value.reason


@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 40, b"../../etc/passwd", digest_of("a").encode() + b"\n", b"\n".join([b"0" * 32] * 400)]
)
@pytest.mark.parametrize("kind", [FrameKind.HAVE, FrameKind.GET, FrameKind.DATA])
def test_anything_but_a_question_ends_the_connection(peers: Peers, kind: FrameKind, payload: bytes) -> None:
    channel = greeted(peers.serve(peers.files("there")).address)
    channel.send(kind, payload)
    if kind is FrameKind.HAVE and payload.startswith(b"000"):
        assert bytes(channel.receive(1 << 20)[1]) == b""
        channel.close()
    else:
        assert ended(channel) == "cut"


def test_a_question_that_is_too_long_ends_the_connection_before_it_is_read(peers: Peers) -> None:
    channel = greeted(peers.serve(peers.files("there")).address)
    channel.send_bytes(wire._HEADER.pack(FrameKind.HAVE, 1 << 31, 0))
    assert ended(channel) == "cut"


def test_a_question_before_the_greeting_is_not_answered(peers: Peers) -> None:
    there = peers.files("there")
    server, meta = peers.serve(there), save_chain(there, "root")[0]
    channel = connected(server.address)
    channel.receive_bytes(greeting._OPENING.size)
    channel.send(FrameKind.GET, meta.digest.encode())
    channel.send_bytes(bytes(200))
    with pytest.raises(PeerError):
        assert greeting.VERDICTS[channel.receive_bytes(33)[0]] == "version"
        channel.receive(1 << 20)
    assert server.status()["num_served"] == 0
    channel.close()


def test_a_client_that_does_not_greet_is_left(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.1)
    channel = connected(peers.serve(peers.files("there")).address)
    channel.receive_bytes(greeting._OPENING.size)
    with pytest.raises(PeerError, match="cut"):
        channel.receive_bytes(1, WAIT_S)
    channel.close()


def test_an_idle_client_is_left(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_server, "IDLE_S", 0.1)
    assert ended(greeted(peers.serve(peers.files("there")).address)) == "cut"


def test_a_client_that_does_not_read_is_left(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.2)
    there = peers.files("there")
    meta = meta_of("large")
    there.save(meta, arrays_of("large", 4 * FRAME_BYTES))
    there.flush()
    server = peers.serve(there)
    channel = greeted(server.address)
    channel.send(FrameKind.GET, meta.digest.encode())
    wait_for_the_end_of_connections(server)
    assert server.status()["num_served"] == 0
    channel.close()


def test_connections_are_limited_and_free_again_when_they_end(peers: Peers) -> None:
    server = peers.serve(peers.files("there"))
    clients = [greeted(server.address) for _ in range(snapshot_server.MAX_CLIENTS)]
    with pytest.raises(PeerError, match="busy"):
        greeted(server.address)
    strangers = [
        connected(server.address) for _ in range(snapshot_server.MAX_CONNECTIONS - snapshot_server.MAX_CLIENTS)
    ]
    for one in strangers:
        one.receive_bytes(greeting._OPENING.size)
    with pytest.raises(PeerError, match="busy"):
        greeted(server.address)
    for one in (*clients, *strangers):
        one.close()
    wait_for_the_end_of_connections(server)
    greeted(server.address).close()


def test_a_closed_server_leaves_no_connection_and_no_thread(peers: Peers) -> None:
    server = peers.serve(peers.files("there"))
    channel = greeted(server.address)
    server.close()
    assert ended(channel) == "cut"
    with pytest.raises(OSError):
        connected(server.address)


def test_a_closed_client_stops_its_fetches(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = peers.client(peers.files("here"))
        running = client.fetch(f"127.0.0.1:{listener.getsockname()[1]}", digest_of("a"), 1, 1)
        accepted = listener.accept()[0]
        client.close()
        accepted.close()
        assert running.done.result(WAIT_S).failure in ("stopped", "busy")
        assert client.fetch("127.0.0.1:1", digest_of("a"), 1, 1).done.result(WAIT_S).failure == "busy"
