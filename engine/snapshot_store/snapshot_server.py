"""SnapshotServer: serves the files of the disk tier to other nodes that have the same model.

One thread accepts connections, and each connection has a thread of its own. They read files past the disk tier's
thread: a file is complete and never changes, and one that is removed stays readable while it is open. Python runs for
some microseconds per frame of a file; checksums, disk and network do not hold the GIL.
"""

import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import chain

from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import DIGEST
from engine.snapshot_store.greeting import Identity, admit
from engine.snapshot_store.wire import (
    FRAME_BYTES,
    MAX_ANSWER_BYTES,
    MAX_QUESTION_BYTES,
    Channel,
    FrameKind,
    Offer,
    PeerError,
)

log = logging.getLogger("orchard.engine")

MAX_CONNECTIONS, MAX_CLIENTS = 16, 4
"""Most connections at a time, and most that have passed the greeting."""

IDLE_S = 15.0
"""A connection without a question for so many seconds is closed."""

WRITE_S = 5.0
"""Longest wait until snapshots that are only in memory are written."""

MAX_WRITES = 4
"""Most snapshots that the engine is asked to write for one question: each takes time between two of its steps."""

ACCEPT_AGAIN_S = 0.1
"""Pause after a connection could not be accepted, for instance because the process has too many open files."""

_DIGESTS = re.compile(rf"{DIGEST.pattern}(\n{DIGEST.pattern})*")


class SnapshotServer:
    """Listens on one address from its construction until `close`.

    Args:
        files: The disk tier.
        identity: What clients must have.
        host: Address to listen on; no other address accepts connections.
        port: Port to listen on; 0 for any.
        write: Asks the engine to write a snapshot that may be only in memory, by its digest; the future says whether
            there will be a file. Must not wait. None: only what is on disk is served.

    Attributes:
        address: `host:port` on which it listens.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        identity: Identity,
        host: str,
        port: int = 0,
        write: Callable[[str], "Future[bool]"] | None = None,
    ):
        self._files = files
        self._identity = identity
        self._write = write
        family, shown = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
        self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._wake, self._waker = socket.socketpair()
        self._lock = threading.Lock()  # guards all following attributes
        self._channels: set[Channel] = set()
        self._num_clients = self._num_served = self._served_bytes = self._num_refused = 0
        self._thread = threading.Thread(target=self._run, name="snapshot-server", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, int]:
        """Return the files and bytes served and the connections refused since the start, and the open connections."""
        with self._lock:
            return {
                "num_served": self._num_served,
                "served_bytes": self._served_bytes,
                "num_refused": self._num_refused,
                "num_connections": len(self._channels),
            }

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._waker.close()
        self._thread.join()

    # On the accepting thread.

    def _run(self) -> None:
        poll = select.poll()
        for one in (self._listener, self._wake):
            poll.register(one, select.POLLIN)
        with self._listener, self._wake:
            while self._wake.fileno() not in [descriptor for descriptor, _ in poll.poll()]:
                try:
                    self._accept(Channel(self._listener.accept()[0]))
                except BlockingIOError:
                    continue
                except (OSError, RuntimeError) as error:  # too many open files, or threads
                    log.warning("%s: a connection could not be accepted: %s", self.address, error)
                    time.sleep(ACCEPT_AGAIN_S)
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.end()

    def _accept(self, channel: Channel) -> None:
        with self._lock:
            is_full = len(self._channels) >= MAX_CONNECTIONS
            self._num_refused += is_full
            if not is_full:
                self._channels.add(channel)
        if is_full:
            channel.close()
            return
        try:
            threading.Thread(target=self._serve, args=(channel,), name="snapshot-client", daemon=True).start()
        except RuntimeError:
            self._forget(channel)
            raise

    # On the threads of the connections.

    def _serve(self, channel: Channel) -> None:
        has_entered = False

        def enter() -> bool:
            nonlocal has_entered
            with self._lock:
                has_entered = self._num_clients < MAX_CLIENTS
                self._num_clients += has_entered
            return has_entered

        try:
            self._greet(channel, enter)
            while True:
                self._answer(channel, *channel.receive(MAX_QUESTION_BYTES, IDLE_S))
        except PeerError as error:
            log.debug("%s: a connection has ended: %s", self.address, error)
        except Exception:
            log.exception("%s: a connection failed", self.address)
        finally:
            with self._lock:
                self._num_clients -= has_entered
            self._forget(channel)

    def _greet(self, channel: Channel, enter: Callable[[], bool]) -> None:
        try:
            admit(channel, self._identity, enter)
        except PeerError as error:
            with self._lock:
                self._num_refused += 1
            log.warning("%s: a client is not admitted: %s", self.address, error)
            raise

    def _answer(self, channel: Channel, kind: FrameKind, payload: memoryview) -> None:
        """Answer a question. Raises PeerError if it is none, so that the connection is closed."""
        text = bytes(payload).decode(errors="replace")
        if kind not in (FrameKind.HAVE, FrameKind.GET) or not _DIGESTS.fullmatch(text):
            raise PeerError("protocol", f"a frame {kind.name} of {len(payload)} bytes is no question")
        digests = text.split("\n")
        if kind is FrameKind.HAVE:
            channel.send(FrameKind.OFFERS, self._offers(digests))
        elif len(digests) == 1:
            self._send_file(channel, digests[0])
        else:
            raise PeerError("protocol", f"GET asks for {len(digests)} snapshots; the limit is 1")

    def _offers(self, digests: Sequence[str]) -> bytes:
        """Return the lines of the snapshots that are on disk and their ancestors, as many as fit into an answer."""
        self._write_missing([digest for digest in digests if not self._files.chain_of(digest)])
        lines, num_bytes = dict[str, bytes](), 0
        for file in chain.from_iterable(map(self._files.chain_of, digests)):
            if file.meta is None or file.digest in lines:
                continue
            line = Offer(file.digest, file.parent, file.meta.num_tokens, file.num_bytes).line
            if (num_bytes := num_bytes + len(line)) > MAX_ANSWER_BYTES:
                break
            lines[file.digest] = line
        return b"".join(lines.values())

    def _write_missing(self, digests: Sequence[str]) -> None:
        """Wait until those that the engine has only in memory are on disk, for WRITE_S at most."""
        until_s = time.monotonic() + WRITE_S
        if self._write is not None:
            wait([self._write(digest) for digest in digests[:MAX_WRITES]], WRITE_S)
        for digest in digests:
            self._files.wait_written(digest, max(0.0, until_s - time.monotonic()))

    def _send_file(self, channel: Channel, digest: str) -> None:
        try:
            file = self._files.open(digest)
        except OSError as error:
            log.info("%s: snapshot %s cannot be served: %s", self.address, digest, error)
            channel.send(FrameKind.GONE)
            return
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            channel.send(FrameKind.FILE, num_bytes.to_bytes(8, "little"))
            for offset in range(0, num_bytes, FRAME_BYTES):
                channel.send_part(file.fileno(), offset, min(FRAME_BYTES, num_bytes - offset))
        self._files.touch(digest)
        with self._lock:
            self._num_served += 1
            self._served_bytes += num_bytes

    def _forget(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            self._channels.discard(channel)
