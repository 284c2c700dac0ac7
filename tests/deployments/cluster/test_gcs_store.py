"""The store over its socket, its process, and Ray's real GCS on it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deployments.cluster import gcs_store
from deployments.cluster.append_log import AppendLog, record_of
from deployments.cluster.gcs_store import HOST, GcsStore, StoreFailed

PASSWORD = "a password"
TIMEOUT_S = 60.0
PONG = b"+PONG\r\n"


class Client:
    made: ClassVar[list["Client"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self._writer = reader, writer
        self.made.append(self)

    async def send(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def ask(self, *words: bytes) -> bytes:
        """Return the first line of the reply."""
        await self.send(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        return await self.reader.readuntil(b"\r\n")

    @classmethod
    async def close_all(cls) -> None:
        while cls.made:
            writer = cls.made.pop()._writer
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def connect(store: GcsStore, password: str | None = PASSWORD) -> Client:
    client = Client(*await asyncio.open_connection(HOST, store.port))
    if password is not None:
        assert await client.ask(b"AUTH", password.encode()) == b"+OK\r\n"
    return client


def with_store(path: Path, talk: Callable[[GcsStore], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        store = GcsStore(path, PASSWORD, **options)
        await store.start()
        stop = asyncio.Event()
        running = asyncio.create_task(store.run(stop))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await talk(store)
        finally:
            await Client.close_all()
            stop.set()
            await running

    return asyncio.run(run())


def test_replies_have_the_bytes_of_the_protocol(tmp_path: Path):
    async def talk(store: GcsStore) -> None:
        client = await connect(store)
        assert await client.ask(b"PING") == PONG
        assert await client.ask(b"DEL", b"DUMMY") == b":0\r\n"
        assert await client.ask(b"HGET", b"h", b"a") == b"$-1\r\n"
        assert await client.ask(b"HSET", b"h", b"a", b"1\r\n2") == b":1\r\n"
        assert await client.ask(b"HMGET", b"h", b"a", b"b") == b"*2\r\n"
        assert await client.reader.readexactly(15) == b"$4\r\n1\r\n2\r\n$-1\r\n"
        assert await client.ask(b"HSCAN", b"h", b"0") == b"*2\r\n"
        assert await client.reader.readexactly(28) == b"$1\r\n0\r\n*2\r\n$1\r\na\r\n$4\r\n1\r\n2\r\n"
        assert (await client.ask(b"NONE")).startswith(b"-ERR unknown command 'NONE'")
        assert await client.ask(b"PING") == PONG, "an error ends no connection"

    with_store(tmp_path / "gcs.log", talk)


def test_commands_that_are_sent_together_are_answered_in_order(tmp_path: Path):
    async def talk(store: GcsStore) -> None:
        client = await connect(store)
        await client.send(b"*1\r\n$4\r\nPING\r\n" * 3 + b"*3\r\n$6\r\nINCRBY\r\n$1\r\nn\r\n$1\r\n2\r\n" * 2)
        assert await client.reader.readexactly(29) == PONG * 3 + b":2\r\n:4\r\n"

    with_store(tmp_path / "gcs.log", talk)


def test_nothing_is_answered_without_the_password(tmp_path: Path):
    async def talk(store: GcsStore) -> None:
        client = await connect(store, password=None)
        assert await client.ask(b"HGET", b"h", b"a") == b"-NOAUTH Authentication required.\r\n"
        for words in ((b"AUTH", b"wrong"), (b"AUTH", b"root", PASSWORD.encode())):
            assert (await client.ask(*words)).startswith(b"-WRONGPASS")
        assert (await client.ask(b"AUTH")).startswith(b"-ERR wrong number")
        await client.send(b"*2\r\n$4\r\nAUTH\r\n$99999\r\n")
        assert await client.reader.readline() == (
            b"-ERR Protocol error: invalid bulk length: 99999 exceeds the limit of 16380\r\n"
        )
        assert await client.reader.read() == b""
        assert await (await connect(store, None)).ask(b"AUTH", b"default", PASSWORD.encode()) == b"+OK\r\n"

    with_store(tmp_path / "gcs.log", talk)


def test_a_connection_that_does_not_give_the_password_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gcs_store, "AUTH_TIMEOUT_S", 0.05)

    async def talk(store: GcsStore) -> None:
        assert await (await connect(store, password=None)).reader.read() == b""

    with_store(tmp_path / "gcs.log", talk)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PING\r\n", b"expected '*', got 'P'"),
        (b"*x\r\n", b"invalid multibulk length"),
        (b"*-1\r\n", b"invalid multibulk length"),
        (b"*99999999\r\n", b"invalid multibulk length: 99999999 exceeds the limit of 131072"),
        (b"*1\r\n:4\r\n", b"expected '$', got ':'"),
        (b"*1\r\n$67108865\r\n", b"invalid bulk length: 67108865 exceeds the limit of 67108864"),
        (b"*1\r\n$4\r\nPINGxx", b"expected the end of a bulk string"),
        (b"*" + b"1" * 70000, b"too big inline request"),
    ],
)
def test_bytes_that_are_no_command_end_the_connection(tmp_path: Path, content: bytes, problem: bytes):
    async def talk(store: GcsStore) -> None:
        client = await connect(store)
        await client.send(content)
        assert await client.reader.readline() == b"-ERR Protocol error: " + problem + b"\r\n"
        assert await client.reader.read() == b""
        assert await (await connect(store)).ask(b"PING") == PONG

    with_store(tmp_path / "gcs.log", talk)


def test_more_connections_than_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gcs_store, "MAX_CONNECTIONS", 2)

    async def talk(store: GcsStore) -> None:
        first, _second = await connect(store), await connect(store)
        third = Client(*await asyncio.open_connection(HOST, store.port))
        assert await third.reader.read() == b"-ERR max number of clients reached, which is 2\r\n"
        assert await first.ask(b"PING") == PONG

    with_store(tmp_path / "gcs.log", talk)


def test_a_state_beyond_the_limit_is_refused_and_can_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gcs_store, "MAX_STATE_BYTES", 100)

    async def talk(store: GcsStore) -> None:
        client = await connect(store)
        assert await client.ask(b"HSET", b"h", b"a", b"x" * 80) == b":1\r\n"
        refused = await client.ask(b"HSET", b"h", b"b", b"x" * 80)
        assert refused == b"-OOM 86 bytes more than the 82 there are exceed 100 bytes\r\n"
        assert await client.ask(b"HDEL", b"h", b"a") == b":1\r\n"
        assert await client.ask(b"HSET", b"h", b"b", b"x" * 80) == b":1\r\n"

    with_store(tmp_path / "gcs.log", talk)


def test_changes_are_in_the_log_when_they_are_answered_and_reads_are_not(tmp_path: Path):
    path = tmp_path / "gcs.log"

    async def talk(store: GcsStore) -> None:
        client = await connect(store)
        await client.ask(b"HSET", b"h", b"a", b"1")
        size = path.stat().st_size
        copy = tmp_path / "copy.log"
        copy.write_bytes(path.read_bytes())  # what a kill would leave
        for words in ((b"HGET", b"h", b"a"), (b"DEL", b"other"), (b"HSETNX", b"h", b"a", b"2"), (b"HSET", b"h")):
            await client.ask(*words)
        assert path.stat().st_size == size

    with_store(path, talk)

    async def read(store: GcsStore) -> None:
        assert await (await connect(store)).ask(b"HGET", b"h", b"a") == b"$1\r\n"

    with_store(tmp_path / "copy.log", read)


def test_compaction_keeps_the_state_and_bounds_the_log(tmp_path: Path):
    path, sizes = tmp_path / "gcs.log", []

    async def write(store: GcsStore) -> None:
        client = await connect(store)
        for i in range(500):
            await client.ask(b"HSET", b"h", b"field%d" % (i % 10), b"%d" % i * 20)
            await client.ask(b"INCRBY", b"n", b"1")
            sizes.append(path.stat().st_size)

    async def read(store: GcsStore) -> list[bytes]:
        client = await connect(store)
        return [await client.ask(b"INCRBY", b"n", b"0"), await client.ask(b"HMGET", b"h", b"field9", b"field0")] + [
            await client.reader.readline() for _ in range(4)
        ]

    with_store(path, write, compact_bytes=4096)
    assert max(sizes) < 5000
    assert with_store(path, read) == [
        b":500\r\n",
        b"*2\r\n",
        b"$60\r\n",
        b"499" * 20 + b"\r\n",
        b"$60\r\n",
        b"490" * 20 + b"\r\n",
    ]


def test_one_process_has_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gcs_store, "LOCK_WAIT_S", 0.0)

    async def talk(store: GcsStore) -> None:
        with pytest.raises(StoreFailed, match=f"gcs.log is in use by process {os.getpid()}"):
            GcsStore(tmp_path / "gcs.log", PASSWORD)

    with_store(tmp_path / "gcs.log", talk)
    with_store(tmp_path / "gcs.log", lambda store: asyncio.sleep(0))


def test_damaged_and_foreign_logs_are_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "gcs.log"
    path.write_bytes(b"something else")
    with pytest.raises(StoreFailed, match=r"byte 0: .*move it away"):
        GcsStore(path, PASSWORD)
    path.unlink()
    log = AppendLog(path)
    log.append(record_of([b"FLUSHALL"]))
    log.close()
    with pytest.raises(StoreFailed, match="ERR unknown command 'FLUSHALL'"):
        GcsStore(path, PASSWORD)


def test_a_change_that_cannot_be_written_ends_the_store_without_an_answer(tmp_path: Path):
    async def run() -> None:
        store = GcsStore(tmp_path / "gcs.log", PASSWORD)
        await store.start()
        running = asyncio.create_task(store.run(asyncio.Event()))
        client = await connect(store)
        full = os.open("/dev/full", os.O_WRONLY)
        log = store._log
        os.dup2(full, log._file)
        os.close(full)
        with pytest.raises(asyncio.IncompleteReadError):
            await client.ask(b"HSET", b"h", b"a", b"1")
        with pytest.raises(OSError, match=r"No space left|Invalid argument"):
            await running
        await Client.close_all()

    if not Path("/dev/full").exists():
        pytest.skip("only Linux has /dev/full")
    asyncio.run(run())


class Process:
    """The store as `orchard serve --cluster` starts it."""

    def __init__(self, log: Path):
        command = [sys.executable, "-m", "deployments.cluster.gcs_store", str(log)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{PASSWORD}\n")
        self.process.stdin.flush()
        self.port = int(self.process.stdout.readline())

    def end(self, signum: int | None = None) -> int:
        if signum is not None:
            self.process.send_signal(signum)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)


def test_the_process_ends_with_its_parent_and_not_by_its_signals(tmp_path: Path):
    store = Process(tmp_path / "gcs.log")
    for signum in (signal.SIGINT, signal.SIGTERM):
        store.process.send_signal(signum)
    with socket.create_connection((HOST, store.port), 10) as client:
        client.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert client.recv(100) == b"-NOAUTH Authentication required.\r\n"
    assert store.end() == 0


class Gcs:
    """Ray's GCS server alone, on the store."""

    def __init__(self, store: Process, directory: Path):
        from ray._private.services import GCS_SERVER_EXECUTABLE

        from tests.e2e.server import free_port

        self._port = free_port()
        command = [
            GCS_SERVER_EXECUTABLE,
            f"--log_dir={directory}",
            f"--gcs_server_port={self._port}",
            f"--node-ip-address={HOST}",
            f"--session-dir={directory}",
            "--session-name=session_of_the_test",
            "--ray-commit=none",
            f"--redis_address={HOST}",
            f"--redis_port={store.port}",
            f"--redis_password={PASSWORD}",
        ]
        self.output = directory / f"gcs-{self._port}.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def client(self) -> Any:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        return GcsClient(address=f"{HOST}:{self._port}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="org-", dir="/tmp") as made:
        yield Path(made)


def test_the_real_gcs_finds_its_state_after_both_were_killed(directory: Path):
    log = directory / "gcs.log"
    store = Process(log)
    gcs = Gcs(store, directory)
    try:
        client = gcs.client()
        for i in range(20):
            assert client.internal_kv_put(b"key%d" % i, b"value%d" % i, True, b"space") == 1
        assert client.internal_kv_put(b"key0", b"other", False, b"space") == 0
        assert client.internal_kv_del(b"key1", False, b"space") == 1
        cluster = client.cluster_id
    finally:
        gcs.kill()
        store.end(signal.SIGKILL)
    store = Process(log)
    gcs = Gcs(store, directory)
    try:
        client = gcs.client()
        assert client.cluster_id == cluster, "the cluster is the same one"
        assert client.internal_kv_get(b"key0", b"space") == b"value0"
        assert client.internal_kv_get(b"key1", b"space") is None
        assert sorted(client.internal_kv_keys(b"key1", b"space")) == [b"key%d" % i for i in range(10, 20)]
        assert client.internal_kv_exists(b"key2", b"space")
        assert client.internal_kv_multi_get([b"key3", b"key4"], b"space") == {b"key3": b"value3", b"key4": b"value4"}
    finally:
        gcs.kill()
        store.end()
