"""GcsStore: keeps the state of Ray's GCS in a file, for a head that comes back; speaks Redis's protocol on loopback.

Run as `python -m deployments.cluster.gcs_store LOG`: the password comes as the first line of its standard input, it
prints the port on which it listens, and it ends when its standard input is closed, so that it never outlives its
parent.

Each change is in the log before it is answered: a kill of the process loses nothing. The disk is synchronized once a
second while there are changes, so a loss of power loses at most the last second or two. The log is written again
without what is outdated when it has grown to twice the state, and is larger than COMPACT_BYTES.
"""

import asyncio
import hmac
import os
import signal
import sys
from pathlib import Path

from deployments.cluster.append_log import AppendLog, LogDamaged, record_of, words_of
from deployments.cluster.hash_store import HashStore, command_of
from deployments.cluster.resp import (
    CommandFailed,
    Limits,
    ProtocolError,
    Reply,
    Status,
    encode,
    encode_error,
    read_command,
)
from engine.process_lock import LockHeld, ProcessLock

HOST = "127.0.0.1"
MAX_CONNECTIONS = 64
AUTH_TIMEOUT_S = 10.0
"""Time in which a new connection must have given the password."""
BEFORE_AUTH = Limits(num_arguments=10, num_bytes=16384)
AFTER_AUTH = Limits(num_arguments=2**17, num_bytes=64 * 2**20)
MAX_STATE_BYTES = 512 * 2**20
"""Limit of all keys, fields and values together; writes beyond it are refused."""
COMPACT_BYTES = 8 * 2**20
SYNC_S = 1.0
LOCK_WAIT_S = 15.0
"""How long to wait for a store that is just ending to release the log."""


class StoreFailed(Exception):
    """The store cannot run; the message is for the operator."""


class GcsStore:
    """The store of one log. Every method runs in one event loop.

    Attributes:
        port: TCP port on loopback, once it has started.
    """

    def __init__(self, path: Path, password: str, compact_bytes: int = COMPACT_BYTES):
        """Open the log.

        Args:
            path: The log; its folder must exist.
            password: What clients must give by AUTH.
            compact_bytes: Size of the log from which it is compacted.

        Raises:
            StoreFailed: Another process has the log, it is damaged, or it cannot be written.
        """
        self._password = password.encode()
        self._compact_bytes = compact_bytes
        self._connections: set[asyncio.Task[None]] = set()
        self._is_synced = True
        self._failed = asyncio.Event()
        self._failure: OSError | None = None
        self._server: asyncio.Server | None = None
        self.port = 0
        try:
            self._lock = ProcessLock(path.with_name(f"{path.name}.lock"), LOCK_WAIT_S)
        except LockHeld as held:
            raise StoreFailed(f"{path} is in use by {held.holder}") from None
        except OSError as problem:
            raise StoreFailed(f"{path} cannot be locked: {problem.strerror}") from None
        try:
            self._state = HashStore()
            self._log = self._open(path)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, path: Path) -> AppendLog:
        try:
            log = AppendLog(path)
            for record in log.take_records():
                self._state.run(words_of(record))
        except LogDamaged as damaged:
            raise StoreFailed(
                f"{damaged}. The cluster cannot be continued from this log: move it away, and the next start makes a "
                "new cluster, which the other machines must join again"
            ) from None
        except (CommandFailed, ValueError) as problem:
            raise StoreFailed(f"{path} has a record that is no command of this store: {problem}") from None
        except OSError as problem:
            raise StoreFailed(f"{path} cannot be read or written: {problem.strerror}") from None
        return log

    async def start(self, port: int = 0) -> None:
        """Listen on loopback. Raises OSError."""
        self._server = await asyncio.start_server(self._on_connection, HOST, port, limit=2**16)
        self.port = self._server.sockets[0].getsockname()[1]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stop is set, or the log can no longer be written. Raises OSError."""
        tasks = {asyncio.create_task(wait()) for wait in (stop.wait, self._failed.wait, self._keep_synced)}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._failure is not None:
                raise self._failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        """End all connections, and the log."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._log.close()
        self._lock.release()

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            if not self._is_synced:
                self._is_synced = True
                await asyncio.to_thread(self._log.sync)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                writer.write(encode_error(f"ERR max number of clients reached, which is {MAX_CONNECTIONS}"))
                return
            async with asyncio.timeout(AUTH_TIMEOUT_S):
                is_known = await self._authenticate(reader, writer)
            while is_known and (words := await read_command(reader, AFTER_AUTH)) is not None:
                writer.write(self._answer(words))
                await writer.drain()
        except ProtocolError as problem:
            writer.write(encode_error(f"ERR Protocol error: {problem}"))
        except (TimeoutError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer until the password has come; return False if the client has ended before."""
        while (words := await read_command(reader, BEFORE_AUTH)) is not None:
            answer, is_known = self._greet(words)
            writer.write(answer)
            await writer.drain()
            if is_known:
                return True
        return False

    def _greet(self, words: list[bytes]) -> tuple[bytes, bool]:
        """Return the answer to a command before the password, and whether it was the password."""
        if not words or words[0].upper() != b"AUTH":
            return encode_error("NOAUTH Authentication required."), False
        try:
            return encode(self._authorize(words)), True
        except CommandFailed as failed:
            return encode_error(str(failed)), False

    def _authorize(self, words: list[bytes]) -> Reply:
        if len(words) not in (2, 3):
            raise CommandFailed("ERR wrong number of arguments for 'auth' command")
        is_user = len(words) == 2 or words[1] == b"default"
        if not (hmac.compare_digest(words[-1], self._password) and is_user):
            raise CommandFailed("WRONGPASS invalid username-password pair or user is disabled.")
        return Status(b"OK")

    def _answer(self, words: list[bytes]) -> bytes:
        try:
            if words and words[0].upper() == b"AUTH":
                return encode(self._authorize(words))
            return encode(self._run(words))
        except CommandFailed as failed:
            return encode_error(str(failed))

    def _run(self, words: list[bytes]) -> Reply:
        """Run a command and log what it has changed. An error of the disk ends the store, and with it the GCS."""
        growth = sum(map(len, words))
        if command_of(words).grows and self._state.num_bytes + growth > MAX_STATE_BYTES:
            raise CommandFailed(
                f"OOM {growth} bytes more than the {self._state.num_bytes} there are exceed {MAX_STATE_BYTES} bytes"
            )
        before = self._state.num_changes
        reply = self._state.run(words)
        if self._state.num_changes != before:
            try:
                self._keep(record_of(words))
            except OSError as problem:
                self._failure = self._failure or problem
                self._failed.set()
                raise ConnectionAbortedError from problem
        return reply

    def _keep(self, record: bytes) -> None:
        self._log.append(record)
        self._is_synced = False
        if self._log.num_bytes > max(self._compact_bytes, 2 * self._state.num_bytes):
            self._log.replace(map(record_of, self._state.commands()))


async def serve(path: Path, password: str) -> None:
    """Run the store until standard input ends. Raises StoreFailed, OSError."""
    store = GcsStore(path, password)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    try:
        await store.start()
        sys.stdout.write(f"{store.port}\n")
        sys.stdout.flush()
        await store.run(stop)
    finally:
        loop.remove_reader(sys.stdin)


def main() -> int:
    """Run the store; return the exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # sent to the whole group, and the GCS must end first
    password = sys.stdin.buffer.readline().decode().strip()
    try:
        asyncio.run(serve(Path(sys.argv[1]), password))
    except (StoreFailed, OSError) as problem:
        sys.stderr.write(f"The store of Ray's GCS has ended: {problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
