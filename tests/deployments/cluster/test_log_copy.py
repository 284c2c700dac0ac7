"""The copy of a store's log over the real sockets, cut at every byte, and what another store reads from it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from deployments.cluster import log_source
from deployments.cluster.append_log import HEADER_BYTES, MAGIC, AppendLog, record_of, words_of
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.gcs_store import GcsStore
from deployments.cluster.hash_store import HashStore
from deployments.cluster.head_service import LOG_PATH, MEMBER_PATH, HeadService
from deployments.cluster.headship import Headship
from deployments.cluster.log_copy import CopyFailed, LogCopy, copied_s
from deployments.cluster.log_source import MAX_PIECE_BYTES, LogSource, Piece
from deployments.cluster.members import Report
from deployments.cluster.proof_client import NoAnswer, NotOfCluster, ProofClient
from deployments.cluster.proof_server import ProofServer

TOKEN = "the token of the cluster"
HOST = "127.0.0.1"
COMPACT_BYTES = 2048


class Original:
    """The store of a head, which writes its log, and the server from which it is copied."""

    def __init__(self, directory: Path):
        self.folder = ClusterFolder(directory)
        self.folder.make()
        self.path = self.folder.store_log
        self.store = GcsStore(self.path, "password", compact_bytes=COMPACT_BYTES)
        self.states: list[bytes] = [state_of(self.store._state)]
        """State of the store after each record of the log."""
        self.service = HeadService(self.folder, Headship(HOST, 1), "id", dict, lambda headship: None)
        self.server = ProofServer(HOST, 0, TOKEN, self.service.answers())
        self.server.start()
        self.hear(HOST)

    def run(self, *words: bytes) -> None:
        self.store._run(list(words))
        self.states.append(state_of(self.store._state))

    def hear(self, address: str, joined_s: float = 1.0, port: int | None = None) -> dict[str, object]:
        client = ProofClient(HOST, port or self.server.port, TOKEN)
        fields = Report(f"of {address}", "", joined_s, None).as_fields()
        return json.loads(client.ask(f"{MEMBER_PATH}?{urlencode(fields)}", 10**6)[0])

    def restart(self) -> None:
        """Read the log again, as after a kill."""
        self.store._log.close()
        self.store._lock.release()
        self.store = GcsStore(self.path, "password", compact_bytes=COMPACT_BYTES)
        self.service.close()
        self.server.stop()
        self.service = HeadService(self.folder, Headship(HOST, 1), "id", dict, lambda headship: None)
        self.server = ProofServer(HOST, 0, TOKEN, self.service.answers())
        self.server.start()
        self.hear(HOST)

    def close(self) -> None:
        self.server.stop()
        self.service.close()
        asyncio.run(self.store.close())


def state_of(state: HashStore) -> bytes:
    return b"".join(sorted(record_of(words) for words in state.commands()))


def copied_state(path: Path) -> bytes:
    """Return the state that a store reads from a copy, whose last byte must be that of a record."""
    size = path.stat().st_size
    log = AppendLog(path)
    state = HashStore()
    for record in log.take_records():
        state.run(words_of(record))
    assert log.num_bytes == size, "the copy ends at the boundary of a record"
    log.close()
    return state_of(state)


@pytest.fixture
def original(tmp_path: Path) -> Iterator[Original]:
    made = Original(tmp_path / "head")
    yield made
    made.close()


class Cut:
    """A way to a server that ends after so many bytes of the second answer: the first one is the challenge."""

    def __init__(self, port: int, num_bytes: int):
        self._target, self._left = port, num_bytes
        self._socket = socket.create_server((HOST, 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for limit in (10**9, self._left):
            client, _ = self._socket.accept()
            with client, socket.create_connection((HOST, self._target)) as server:
                server.sendall(client.recv(65536))
                answer = b"".join(iter(lambda: server.recv(65536), b""))
                client.sendall(answer[:limit])

    def close(self) -> None:
        self._thread.join()
        self._socket.close()


def pull(port: int, copy: LogCopy) -> bool:
    """Ask for the next piece and add it; return whether it was the last one."""
    generation, offset = copy.position
    fields = {"address": f"of {HOST}", "generation": generation, "offset": str(offset)}
    body, _ = ProofClient(HOST, port, TOKEN).ask(f"{LOG_PATH}?{urlencode(fields)}", MAX_PIECE_BYTES)
    return copy.add(Piece.unpack(body))


def pull_all(original: Original, copy: LogCopy) -> None:
    while not pull(original.server.port, copy):
        pass


def test_a_copy_that_is_cut_at_any_byte_is_a_prefix_and_goes_on(original: Original, tmp_path: Path):
    path = tmp_path / "gcs.copy"
    copy = LogCopy(path)
    pull_all(original, copy)
    original.run(b"HSET", b"h", b"a", b"1")
    original.run(b"INCRBY", b"n", b"7")
    before, num_bytes = path.read_bytes(), 0
    for num_bytes in range(2000):  # far more than the answer with its headers
        if num_bytes % 20 == 0:  # as a member does every few seconds: one that is silent gets no log
            original.hear(HOST)
        way = Cut(original.server.port, num_bytes)
        try:
            is_last = pull(way.port, copy)
        except (NoAnswer, NotOfCluster):
            assert path.read_bytes() == before and copied_state(path) == original.states[0], num_bytes
        else:
            assert is_last
            break
        finally:
            way.close()
    assert 300 < num_bytes < 1999, "the answer with its headers"
    assert path.read_bytes() == original.path.read_bytes() and copied_state(path) == original.states[-1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_copy_is_a_prefix_while_the_log_grows_is_compacted_and_its_store_restarts(
    original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_source, "PIECE_BYTES", 300)  # several pieces, and records that exceed one
    path = tmp_path / "gcs.copy"
    copy = LogCopy(path)
    inodes = {original.path.stat().st_ino}
    num_copied = 0
    for i in range(300):
        original.run(b"HSET", b"h", b"field%d" % (i % 5), b"%d" % i * (1 + 400 * (i % 50 == 7)))
        inodes.add(original.path.stat().st_ino)
        if i % 3:
            num_copied += pull(original.server.port, copy)
        if i % 70 == 69:
            original.restart()
        if i % 90 == 89:
            copy = LogCopy(path)
        assert not path.exists() or copied_state(path) in original.states
    pull_all(original, copy)
    assert path.read_bytes() == original.path.read_bytes() and copied_state(path) == original.states[-1]
    assert len(inodes) > 1 and num_copied > 50 and [one.name for one in tmp_path.iterdir()] == ["head", "gcs.copy"]


def test_a_compaction_in_the_middle_of_a_copy_begins_it_anew_and_keeps_the_old_one(
    original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "gcs.copy"
    copy = LogCopy(path)
    original.run(b"HSET", b"h", b"a", b"old")
    pull_all(original, copy)
    complete = path.read_bytes()
    monkeypatch.setattr(log_source, "PIECE_BYTES", 100)
    original.store._log.replace(map(record_of, original.store._state.commands()))
    for i in range(10):
        original.run(b"HSET", b"h%d" % i, b"b", b"x" * 60)
    assert not pull(original.server.port, copy) and path.read_bytes() == complete
    original.store._log.replace(map(record_of, original.store._state.commands()))
    assert not pull(original.server.port, copy) and path.read_bytes() == complete
    pull_all(original, copy)
    assert copied_state(path) == original.states[-1]


def test_what_a_crash_of_the_copying_process_has_left_is_cut_off(original: Original, tmp_path: Path):
    path = tmp_path / "gcs.copy"
    copy = LogCopy(path)
    pull_all(original, copy)
    with path.open("ab") as file:
        file.write(b"half of a rec")  # written, but not counted
    original.run(b"HSET", b"h", b"a", b"1")
    pull_all(original, copy)
    assert path.read_bytes() == original.path.read_bytes()


@pytest.mark.parametrize("place", [0, len(MAGIC) + 2, len(MAGIC) + HEADER_BYTES + 2])
def test_a_damaged_piece_is_refused_and_copied_again(original: Original, tmp_path: Path, place: int):
    original.run(b"HSET", b"h", b"a", b"1")
    source, copy = LogSource(original.path), LogCopy(tmp_path / "gcs.copy")
    piece = source.read("", 0)
    content = bytearray(piece.content)
    content[place] ^= 1
    with pytest.raises(CopyFailed, match=r"checksum|the log begins with"):
        copy.add(Piece(piece.generation, 0, True, bytes(content)))
    with pytest.raises(CopyFailed, match="ends within a record, 20 bytes"):
        copy.add(Piece(piece.generation, 0, True, piece.content[: len(MAGIC) + 20]))
    with pytest.raises(CopyFailed, match=r"a piece at byte 7 .* follows"):
        copy.add(Piece(piece.generation, 7, True, b""))
    assert copied_s(tmp_path / "gcs.copy") is None and copy.position == ("", 0)
    assert copy.add(source.read(*copy.position)) and copied_state(tmp_path / "gcs.copy") == original.states[-1]
    source.close()


def test_a_copy_has_a_limit(original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployments.cluster.log_copy.MAX_COPY_BYTES", 40)
    original.run(b"HSET", b"h", b"a", b"1")
    with pytest.raises(CopyFailed, match="exceeds the limit of 40"):
        pull_all(original, LogCopy(tmp_path / "gcs.copy"))


def test_nobody_reads_the_log_without_the_token_or_without_being_chosen(original: Original):
    path = f"{LOG_PATH}?{urlencode({'address': f'of {HOST}', 'offset': '0'})}"
    with pytest.raises(NotOfCluster, match=r"answered 403"):
        ProofClient(HOST, original.server.port, "another token").ask(path, MAX_PIECE_BYTES)
    assert original.hear("10.0.0.2", 2.0)["has_copy"] is True
    assert original.hear("10.0.0.3", 3.0)["has_copy"] is False, "two machines have copies"
    with pytest.raises(NotOfCluster, match=r"answered 400: .*of 10.0.0.3 is none of the machines that copy the log"):
        ProofClient(HOST, original.server.port, TOKEN).ask(f"{LOG_PATH}?address=of+10.0.0.3", MAX_PIECE_BYTES)
    assert original.hear("10.0.0.4", 0.5)["has_copy"] is True, "the longest in the cluster"
    assert original.hear("10.0.0.2", 2.0)["has_copy"] is False
