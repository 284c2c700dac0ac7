"""GcsRelay: the way of a member's Ray to the GCS of the head, whichever machine that is.

Ray's processes know the GCS by one address for as long as they live. On a member this is a port of the member itself,
so that they go on with their caches and streams when another machine becomes the head: the relay connects them there.
With TLS it ends their connections, since the GCS's certificate is that of the head's address, and opens others to it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from deployments.cluster.mutual_tls import MachineTls

CONNECT_S = 2.0
"""Longest wait for the GCS to accept a connection."""
HANDSHAKE_S = 6.0
"""The same with TLS, for which its process must run."""
CHUNK_BYTES = 2**16
MAX_CONNECTIONS = 1024
CLOSE_S = 1.0
"""Longest wait for a peer to read what is left; then the connection is reset."""
STOP_S = 5.0
LOOPBACK = "127.0.0.1"


class GcsRelay:
    """The relay, with a thread of its own. It accepts connections of this machine alone.

    Args:
        host: Address of this machine, on which it listens.
        port: Port on which it listens; 0: any.
        target: Address and port of the GCS.
        tls: This machine's end of all connections; None: they are not encrypted.

    Attributes:
        port: Port on which it listens.
    """

    def __init__(self, host: str, port: int, target: tuple[str, int], tls: MachineTls | None = None):
        """Bind the port and start. Raises OSError."""
        self._host = host
        self._target = target
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gcs-relay", daemon=True)
        self._thread.start()
        listen = asyncio.start_server if tls is None else tls.listen
        self._server: asyncio.Server = self._call(listen(self._on_connection, host, port))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def target(self) -> tuple[str, int]:
        """Address and port of the GCS."""
        return self._target

    def connect_to(self, target: tuple[str, int]) -> None:
        """Connect to another GCS from now on; connections to the old one are closed, and Ray opens new ones."""
        if target != self._target:
            self._target = target
            self._call(self._end_connections())

    def stop(self) -> None:
        """End all connections, and release the port."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STOP_S)

    async def _stop(self) -> None:
        self._server.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        for task in (tasks := list(self._connections)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            is_here = writer.get_extra_info("peername")[0] in (self._host, LOOPBACK)
            if is_here and (self._tls is None or self._tls.is_machine(writer)):
                await self._relay(reader, writer)
        await _close(writer)
        self._connections.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes both ways until one end closes."""
        if len(self._connections) > MAX_CONNECTIONS:
            return
        async with asyncio.timeout(CONNECT_S if self._tls is None else HANDSHAKE_S):
            connect = asyncio.open_connection if self._tls is None else self._tls.open
            from_gcs, to_gcs = await connect(*self._target)
        ways = {asyncio.create_task(_pass(reader, to_gcs)), asyncio.create_task(_pass(from_gcs, writer))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            try:
                await asyncio.gather(*ways, return_exceptions=True)
            finally:  # the relay may stop meanwhile
                await _close(to_gcs)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(AttributeError):  # Python 3.11.2 cannot abort an encrypted connection that was closed
            writer.transport.abort()
