"""The process that reads large bodies: its loop (`main`) and, in the process that started it, its other end.

Reading a body of megabytes is one long call of C code or many short ones of Python; in a thread either would take the
event loop's turn. The two ends talk over a socket: length, then pickled data, or the body as it is behind
the name of its dialect. The process ends
when the socket does, so it never outlives the one that started it.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

import psutil

from deployments.http.request_reader import Dialect, ParsedRequest, ReadingRules, read_request
from engine.protocol import EngineFailed, InvalidRequest, OrchardError

RECYCLE_BYTES = 512 * 2**20
"""A process that holds more memory than this after a body is replaced."""

_READY = b"!"
_LENGTH = struct.Struct(">Q")
_ANSWER = struct.Struct(">QQ?")
"""Bytes of the pickled answer, bytes of the messages behind it, whether the process ends then."""


class ProcessDied(Exception):
    """The process ended before it had answered."""


class BodyProcess:
    """The end that asks. One body at a time; after any exception the process must be killed.

    Args:
        rules: for all bodies.
        max_memory_bytes: private memory that the process may allocate (Linux; elsewhere there is no such limit).
    """

    def __init__(self, rules: ReadingRules, max_memory_bytes: int):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from deployments.http.body_process import main; main()"],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        start = pickle.dumps((rules, max_memory_bytes))
        self._socket.sendall(_LENGTH.pack(len(start)) + start)
        self._socket.setblocking(False)
        self.has_answered = False
        """Whether the last body has been answered and the process takes another one."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def until_ready(self) -> None:
        """Raises ProcessDied."""
        try:
            await self._receive(asyncio.get_running_loop(), len(_READY))
        except OSError as error:
            raise ProcessDied from error

    async def read(self, body: bytes, dialect: Dialect) -> ParsedRequest:
        """Raises what `read_request` raises, ProcessDied."""
        loop = asyncio.get_running_loop()
        self.has_answered = False
        try:
            name = dialect.encode()
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(name)) + name + _LENGTH.pack(len(body)))
            await loop.sock_sendall(self._socket, body)
            num_bytes, num_message_bytes, is_last = _ANSWER.unpack(await self._receive(loop, _ANSWER.size))
            head, messages = await self._receive(loop, num_bytes), await self._receive(loop, num_message_bytes)
            answer = pickle.loads(head, buffers=[messages])  # noqa: S301 our own process made it
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
            received = await loop.sock_recv_into(self._socket, view[num_received:])
            if not received:
                raise ProcessDied
            num_received += received
        return data

    def kill(self) -> None:
        """Does not wait for its end: to free gigabytes takes the kernel longer than an event loop may stand still."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, name="reap body process").start()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the terminal: requests drain first
    with (
        socket.socket(fileno=0) as connection,
        connection.makefile("rb") as stream,
        contextlib.suppress(BrokenPipeError),
    ):
        rules, max_memory_bytes = pickle.loads(_next_message(stream) or b"")  # noqa: S301 from whoever started us
        with contextlib.suppress(ValueError, OSError):  # macOS knows the limit, but does not keep it
            resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
        connection.sendall(_READY)
        gc.freeze()
        gc.disable()  # within a body: values of JSON hold no cycles
        is_last = False
        while not is_last and (dialect := _next_message(stream)) and (body := _next_message(stream)) is not None:
            answer, messages = _answer_to(body, dialect.decode(), rules, max_memory_bytes)
            del body
            gc.collect()
            is_last = psutil.Process().memory_info().rss > RECYCLE_BYTES
            connection.sendall(_ANSWER.pack(len(answer), len(messages), is_last))
            connection.sendall(answer)
            connection.sendall(messages)
            del answer, messages


def _answer_to(body: bytes, dialect: Any, rules: ReadingRules, max_memory_bytes: int) -> tuple[bytes, memoryview]:
    """What was read, or the error, pickled, and its messages."""
    answer: ParsedRequest | Exception
    try:
        answer = read_request(body, dialect, rules).packed()
    except OrchardError as error:
        answer = error.with_traceback(None)
    except MemoryError:
        answer = InvalidRequest(
            f"The request body of {len(body)} bytes takes more than {max_memory_bytes} bytes of memory to read, "
            "which is the limit."
        )
    except Exception as error:
        answer = EngineFailed(f"a request body could not be read: {error!r}")
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
    return pickled, buffers[0].raw() if buffers else memoryview(b"")


def _next_message(stream: BinaryIO) -> bytes | None:
    """None where the other end is closed."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    num_bytes = _LENGTH.unpack(head)[0]
    message = stream.read(num_bytes)
    return message if len(message) == num_bytes else None
