"""SnapshotClient: fetches snapshots from the servers of other nodes into the disk tier.

Each fetch runs on a thread of its own, at most MAX_TRANSFERS at a time, and always ends with a `Fetched`: whatever goes
wrong is logged, counted, and a miss for the prompt that waits. The files that arrived before stay.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from engine.snapshot_store.files import SnapshotFiles, SnapshotLost, Standing
from engine.snapshot_store.greeting import Identity, greet
from engine.snapshot_store.wire import (
    FRAME_BYTES,
    MAX_ANSWER_BYTES,
    Channel,
    FetchFailure,
    FrameKind,
    Offer,
    PeerError,
)

log = logging.getLogger("orchard.engine")

MAX_TRANSFERS, MAX_WAITING = 3, 8
"""Most fetches at a time, one of which may be of a snapshot that is handed over, and most that wait for these."""

QUIET: tuple[FetchFailure, ...] = ("slow", "stopped")
"""Failures that are decisions."""

CONNECT_S = 2.0
"""Longest time to connect to a server."""


@dataclass(frozen=True)
class Fetched:
    """The end of a fetch."""

    failure: FetchFailure | None
    """Why the snapshot is not there; None if it is."""
    num_snapshots: int = 0
    """Files that were transferred, ancestors included."""
    num_bytes: int = 0
    """Bytes that were transferred, those of an incomplete file included."""
    seconds: float = 0.0
    """Time of the transfer, without connecting and asking."""
    last: str = ""
    """Digest of the longest snapshot that has arrived, also after a failure; '' without one."""


@dataclass(eq=False)
class Fetch:
    """A fetch that has begun."""

    address: str
    """`host:port` of the server."""
    digest: str
    num_tokens: int
    """Tokens of the snapshot."""
    max_bytes: int
    """Largest transfer that is worth its time."""
    standing: Standing | None = None
    """Rank of a snapshot that is handed over; None: a prompt waits for it."""
    done: "Future[Fetched]" = field(default_factory=Future)
    """Never raises."""
    is_stopped: bool = False
    channel: Channel | None = None
    num_snapshots: int = 0
    num_bytes: int = 0
    began_s: float | None = None
    """When the transfer began; monotonic seconds."""
    last: str = ""
    """See Fetched."""

    def stop(self) -> None:
        """End the fetch, because nothing waits for it; it fails with `stopped`."""
        self.is_stopped = True
        if (channel := self.channel) is not None:
            channel.end()


class SnapshotClient:
    """Fetches snapshots until `close`.

    Args:
        files: The disk tier that receives the snapshots.
        identity: What the servers must have as well.
    """

    def __init__(self, files: SnapshotFiles, identity: Identity):
        self._files = files
        self._identity = identity
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, "snapshot-fetch")
        self._lock = threading.Lock()  # guards all following attributes
        self._fetches: set[Fetch] = set()
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # by FetchFailure

    def fetch(
        self, address: str, digest: str, num_tokens: int, max_bytes: int, standing: Standing | None = None
    ) -> Fetch:
        """Begin to fetch a snapshot, with those of its ancestors that are not here.

        Args:
            address: `host:port` of a server.
            digest: Digest of the snapshot.
            num_tokens: Its tokens.
            max_bytes: Nothing is transferred if it would be more than this.
            standing: See Fetch.
        """
        fetch = Fetch(address, digest, num_tokens, max_bytes, standing)
        with self._lock:
            is_accepted = not self._is_closed and len(self._fetches) < MAX_TRANSFERS + MAX_WAITING
            if is_accepted:
                self._fetches.add(fetch)
                self._threads.submit(self._run, fetch)
        if not is_accepted:
            if standing is None:
                self.count_failure("busy")
            fetch.done.set_result(Fetched("busy"))
        return fetch

    @property
    def is_awaited(self) -> bool:
        """Whether a prompt waits for a fetch."""
        with self._lock:
            return any(fetch.standing is None for fetch in self._fetches)

    def count_failure(self, failure: FetchFailure) -> None:
        """Count a snapshot that was not fetched."""
        with self._lock:
            self._failures[failure] += 1

    def status(self) -> dict[str, int]:
        """Return the snapshots fetched since the start, and their bytes and microseconds, also of incomplete files."""
        with self._lock:
            return {name: self._counts[name] for name in ("num_fetched", "fetched_bytes", "fetched_us")}

    def failures(self) -> dict[str, int]:
        """Return how many snapshots that prompts waited for were not fetched since the start, by FetchFailure."""
        with self._lock:
            return dict(self._failures)

    def close(self) -> None:
        """Stop all fetches, and accept no more."""
        with self._lock:
            self._is_closed = True
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.stop()
        self._threads.shutdown()

    # On the threads of the fetches.

    def _run(self, fetch: Fetch) -> None:
        failure: FetchFailure | None = None
        try:
            self._transfer(fetch)
        except PeerError as error:
            failure = "stopped" if fetch.is_stopped else error.reason
            is_quiet = failure in QUIET or (fetch.standing is not None and failure == "room")
            level = logging.INFO if is_quiet else logging.WARNING
            text = "a snapshot of %d tokens was not fetched from %s: %s"
            log.log(level, text, fetch.num_tokens, fetch.address, error)
        except Exception:
            failure = "internal"
            log.exception("a snapshot of %d tokens was not fetched from %s", fetch.num_tokens, fetch.address)
        seconds = 0.0 if fetch.began_s is None else time.monotonic() - fetch.began_s
        with self._lock:
            self._fetches.discard(fetch)
            self._counts["num_fetched"] += fetch.num_snapshots
            self._counts["fetched_bytes"] += fetch.num_bytes
            self._counts["fetched_us"] += int(1e6 * seconds)
            if failure is not None and fetch.standing is None:
                self._failures[failure] += 1
        fetch.done.set_result(Fetched(failure, fetch.num_snapshots, fetch.num_bytes, seconds, fetch.last))

    def _transfer(self, fetch: Fetch) -> None:
        """Fetch what is missing, each file after its parent. Raises PeerError."""
        with closing(_connect(fetch.address)) as channel:
            fetch.channel = channel
            if fetch.is_stopped:
                raise PeerError("stopped", "nothing waits for it any more")
            greet(channel, self._identity)
            missing = [offer for offer in _offers(channel, fetch) if not self._files.chain_of(offer.digest)]
            num_bytes, limit = sum(offer.num_bytes for offer in missing), self._files.room(fetch.standing)
            if num_bytes > limit:
                rule = "prefix_cache.disk.max_gb" if fetch.standing is None else "free, or worth less"
                raise PeerError("room", f"it takes {num_bytes} bytes; the limit is {limit} ({rule})")
            if num_bytes > fetch.max_bytes:
                raise PeerError("slow", f"{num_bytes} bytes take longer than computing; {fetch.max_bytes} would not")
            fetch.began_s = time.monotonic()
            for offer in missing:
                self._receive(channel, fetch, offer)

    def _receive(self, channel: Channel, fetch: Fetch, offer: Offer) -> None:
        channel.send(FrameKind.GET, offer.digest.encode())
        kind, payload = channel.receive(8)
        if kind is FrameKind.GONE or (kind is FrameKind.FILE and int.from_bytes(payload, "little") != offer.num_bytes):
            raise PeerError("gone", "the server does not have it any more")
        _expect(kind, FrameKind.FILE)
        try:
            with self._files.temporary(offer.digest) as file:
                left = offer.num_bytes
                while left:
                    kind, payload = channel.receive(min(FRAME_BYTES, left))
                    _expect(kind, FrameKind.DATA)
                    if not payload:
                        raise PeerError("protocol", f"a frame is empty, {left} bytes before the end of the file")
                    left -= len(payload)
                    fetch.num_bytes += len(payload)
                    while payload:
                        payload = payload[file.write(payload) :]
                failure = self._files.adopt(offer.digest, file, fetch.standing).result()
        except OSError as error:
            raise PeerError("disk", f"it cannot be written: {error}") from None
        except SnapshotLost as error:
            raise PeerError("stopped", str(error)) from None
        if failure is not None:
            raise PeerError(failure, f"the disk tier does not take the file of {offer.num_tokens} tokens over")
        fetch.num_snapshots, fetch.last = fetch.num_snapshots + 1, offer.digest


def _connect(address: str) -> Channel:
    host, _, port = address.rpartition(":")
    try:
        return Channel(socket.create_connection((host.strip("[]"), int(port)), CONNECT_S))
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError("unreachable", f"no connection: {error}") from None


def _offers(channel: Channel, fetch: Fetch) -> Sequence[Offer]:
    """Ask for a snapshot; return it after its ancestors, the first ancestor first. Raises PeerError."""
    channel.send(FrameKind.HAVE, fetch.digest.encode())
    kind, payload = channel.receive(MAX_ANSWER_BYTES)
    _expect(kind, FrameKind.OFFERS)
    offers = Offer.parse_all(bytes(payload))
    if not offers:
        raise PeerError("gone", "the server does not have it any more")
    if (offers[-1].digest, offers[-1].num_tokens) != (fetch.digest, fetch.num_tokens):
        raise PeerError("mismatch", f"the server offers {offers[-1]}")
    parents = [Offer("", "", 0, 0), *offers]
    if any(o.parent != p.digest or o.num_tokens <= p.num_tokens for p, o in zip(parents, offers, strict=False)):
        raise PeerError("protocol", f"the {len(offers)} snapshots offered are no chain")
    return offers


def _expect(kind: FrameKind, expected: FrameKind) -> None:
    if kind is not expected:
        raise PeerError("protocol", f"the server answers {kind.name} instead of {expected.name}")
