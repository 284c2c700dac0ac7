"""BodyProcess: a subprocess that parses large bodies: its loop (`main`) and its proxy in the parent process.

Parsing megabytes takes one long call of C code or many short ones of Python; in a thread either would block the event
loop. The two sides talk over a socket: the parent sends the kind and the raw body, each after its length; the child
answers with pickled data, the result and its log lines. The child ends when the socket closes, so it never outlives its
parent.
"""

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import BinaryIO

import psutil

from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.request_reader import read_request
from engine import worker_log
from engine.errors import EngineFailed, InvalidRequest, OrchardError
from engine.processing.worker_process import resident_bytes
from engine.socket_pair import wide_socket_pair
from engine.worker_log import WorkerLog

logger = logging.getLogger("orchard.http")

RECYCLE_BYTES = 512 * 2**20
"""A process whose resident memory exceeds this after a body is replaced."""

PIECE_BYTES = 256 * 2**10
"""Bytes per send and receive on the event loop. One call for a whole body would copy it at once, in up to 0.1 s."""

WATCH_PERIOD_S = 0.1
"""Period in which the process's memory is read where the system does not limit it."""

_READY = b"!"
_LENGTH = struct.Struct(">Q")
_ANSWER = struct.Struct(">QQ?")
"""Length of the pickled answer, length of the messages that follow it, whether the process ends afterwards."""


class ProcessDied(Exception):
    """The process ended before it answered."""


class BodyProcess:
    """The parent's side. It takes one body at a time; after ProcessDied or a timeout the process must be killed.

    Args:
        rules: Rules for all bodies.
        max_memory_bytes: Private memory that the process may allocate.
        is_watched: Whether this process watches the other's resident memory, as macOS accepts the limit without
            enforcing it.
    """

    def __init__(self, rules: ReadingRules, max_memory_bytes: int, is_watched: bool = sys.platform == "darwin"):
        self._max_memory_bytes, self._is_watched = max_memory_bytes, is_watched
        self._is_too_large = False
        self._socket, theirs = wide_socket_pair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", "from deployments.http.body_process import main; main()"],
                    stdin=theirs.fileno(),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            start = pickle.dumps((rules, max_memory_bytes, is_watched))
            self._socket.sendall(_LENGTH.pack(len(start)) + start)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.has_answered = False
        """Whether the last body was answered and the process accepts another one."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def until_ready(self) -> None:
        """Wait until the process accepts bodies. Raises ProcessDied."""
        try:
            await self._receive(asyncio.get_running_loop(), len(_READY))
        except OSError as error:
            raise ProcessDied from error

    async def read(self, body: bytes, kind: str) -> ParsedRequest:
        """Parse a body. Raises ProcessDied, and what `read_request` raises."""
        watch = asyncio.ensure_future(self._watch()) if self._is_watched else None
        try:
            return await self._read(body, kind)
        except ProcessDied:
            if self._is_too_large:
                raise too_large(len(body), self._max_memory_bytes) from None
            raise
        finally:
            if watch is not None:
                watch.cancel()

    async def _watch(self) -> None:
        while not self._is_too_large:
            await asyncio.sleep(WATCH_PERIOD_S)
            if resident_bytes(self.pid) > self._max_memory_bytes:
                self._is_too_large = True
                self._process.kill()

    async def _read(self, body: bytes, kind: str) -> ParsedRequest:
        loop = asyncio.get_running_loop()
        self.has_answered = False
        try:
            name = kind.encode()
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(name)) + name + _LENGTH.pack(len(body)))
            view = memoryview(body)
            for start in range(0, len(body), PIECE_BYTES):
                await loop.sock_sendall(self._socket, view[start : start + PIECE_BYTES])
                await asyncio.sleep(0)  # a send that need not wait does not yield to other tasks
            num_bytes, num_message_bytes, is_last = _ANSWER.unpack(await self._receive(loop, _ANSWER.size))
            head, messages = await self._receive(loop, num_bytes), await self._receive(loop, num_message_bytes)
            answer, records = pickle.loads(head, buffers=[messages])  # noqa: S301 written by our own subprocess
            worker_log.write(records, self.pid)
            self.has_answered = not is_last
        except OSError as error:
            raise ProcessDied from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _receive(self, loop: asyncio.AbstractEventLoop, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, num_received = memoryview(data), 0
        while num_received < num_bytes:
            received = await loop.sock_recv_into(self._socket, view[num_received : num_received + PIECE_BYTES])
            if not received:
                raise ProcessDied
            num_received += received
        return data

    def kill(self) -> None:
        """Kill the process without waiting for its end, as freeing gigabytes would block the event loop."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, name="reap body process").start()


def main() -> None:
    """Parse bodies until the socket closes or the process has grown beyond RECYCLE_BYTES."""
    log = WorkerLog()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the terminal, but requests drain
    with (
        socket.socket(fileno=0) as connection,
        connection.makefile("rb") as stream,
        contextlib.suppress(BrokenPipeError),
    ):
        rules, max_memory_bytes, is_watched = pickle.loads(_next_message(stream) or b"")  # noqa: S301 from our own parent
        if not is_watched:
            with contextlib.suppress(ValueError, OSError):  # the operator's limit is lower
                resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
        connection.sendall(_READY)
        gc.freeze()
        gc.disable()  # while parsing, as JSON values have no cycles
        is_last = False
        while not is_last and (kind := _next_message(stream)) and (body := _next_message(stream)) is not None:
            answer, messages = _answer_to(body, kind.decode(), rules, max_memory_bytes, log)
            del body
            gc.collect()
            is_last = psutil.Process().memory_info().rss > RECYCLE_BYTES
            connection.sendall(_ANSWER.pack(len(answer), len(messages), is_last))
            connection.sendall(answer)
            connection.sendall(messages)
            del answer, messages


def _answer_to(
    body: bytes, kind: str, rules: ReadingRules, max_memory_bytes: int, log: WorkerLog
) -> tuple[bytes, memoryview]:
    """Parse a body; return the pickled result or error with the log lines, and its packed messages."""
    answer: ParsedRequest | Exception
    try:
        answer = read_request(body, kind, rules).packed()
    except OrchardError as error:
        answer = error.with_traceback(None)
    except MemoryError:
        answer = too_large(len(body), max_memory_bytes)
    except Exception as error:
        logger.exception("a request body of %d bytes could not be read", len(body))
        answer = EngineFailed(f"a request body could not be read: {error!r}")
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps((answer, log.take()), protocol=5, buffer_callback=buffers.append)
    return pickled, buffers[0].raw() if buffers else memoryview(b"")


def too_large(num_bytes: int, max_memory_bytes: int) -> InvalidRequest:
    """Return the error for a body whose parsing takes too much memory."""
    return InvalidRequest(
        f"Parsing the request body of {num_bytes} bytes takes more memory than the limit of {max_memory_bytes} bytes."
    )


def _next_message(stream: BinaryIO) -> bytes | None:
    """Read the next message; None if the socket is closed."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    num_bytes = _LENGTH.unpack(head)[0]
    message = stream.read(num_bytes)
    return message if len(message) == num_bytes else None
