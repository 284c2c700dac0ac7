"""SnapshotTakeOver: an engine takes over what other nodes know, before a prompt asks for it.

A node that leaves hands its conversations over, one that has joined warms itself by prefixes that many prompts share,
and copies of conversations may be kept for the death of their node. The files join the disk tier, in free room or in
place of what is worth less; memory is not touched, and the engine's thread is only needed for some milliseconds between
two steps. One snapshot is transferred at a time, so that prompts that wait for a fetch need not wait for these.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from engine.async_device_thread import AsyncDeviceThread
from engine.core.engine_core import EngineCore
from engine.errors import EngineFailed
from engine.placement import MovableSnapshot, TakenOver
from engine.snapshot_store.exchange import SnapshotExchange
from engine.snapshot_store.files import Standing, StoredFile
from engine.snapshot_store.snapshot_client import Fetch, Fetched
from engine.snapshot_store.wire import FetchFailure, NotTaken, Purpose

log = logging.getLogger("orchard.engine")

HOPELESS: tuple[FetchFailure, ...] = (
    "busy",
    "unreachable",
    "version",
    "token",
    "certificate",
    "format",
    "fingerprint",
    "timeout",
)
"""After such a failure a node is asked for nothing else."""

MARGIN = 1.5
"""Factor by which a snapshot must be worth more than a file that is evicted for it, as in memory."""

BUSY_S, BUSY_FOR_S = 0.2, 20.0
"""Pause before a node that has too many clients is asked again, and how long it is asked; then for nothing else."""

LOOK_S = 0.1
"""Interval between two looks at whether a transfer may go on."""

MAX_WARM, WARM_SHARE = 8, 0.25
"""The most prefixes by which a node warms itself, and the most of its disk tier that they take."""

WARM_FOR_S = 600.0
"""A node that has not been idle for long enough within so many seconds stays as it is."""

IDLE_WAIT_S = 5.0
"""Longest wait of a node that gives a copy until its link is idle."""


class SnapshotTakeOver:
    """Gives and takes snapshots on the event loop; `write` may be called in any thread.

    Args:
        thread: The engine's thread.
        exchange: Returns the exchange with other nodes; None without one.
        is_idle: Returns whether no request is open.
        is_leaving: Returns whether this node is drained or stopped.
    """

    def __init__(
        self,
        thread: AsyncDeviceThread[EngineCore],
        exchange: Callable[[], SnapshotExchange | None],
        is_idle: Callable[[], bool],
        is_leaving: Callable[[], bool],
    ):
        self._thread = thread
        self._exchange = exchange
        self._is_idle = is_idle
        self._is_leaving = is_leaving
        self._turn = asyncio.Lock()
        self._num_urgent = 0  # take-overs of nodes that leave, for which all others stop
        self._warming: asyncio.Task[None] | None = None
        self._num_files: Counter[str] = Counter()  # by Purpose
        self._num_bytes: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()  # by NotTaken

    def write(self, digest: str) -> "Future[bool]":
        """Write a snapshot that may be only in memory, between two steps; see PrefixCache.write_now.

        May be called in any thread. Nothing completes the future of an engine that ends meanwhile.
        """
        done: Future[bool] = Future()

        def write(core: EngineCore) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(core.prefixes.write_now(digest))
            except Exception:  # must not end the device thread
                log.exception("a snapshot could not be written for another node")
                done.set_result(False)

        self._thread.submit(write)
        return done

    async def offered(self, max_snapshots: int, shared_only: bool = False) -> tuple[MovableSnapshot, ...]:
        """Return the snapshots that are worth most at another node, see MovableSnapshots; () if nothing is shared.

        Raises:
            EngineFailed: The engine is not ready.
        """
        if self._exchange() is None:
            return ()
        return tuple(await self._thread.call(lambda core: core.movable.offered(max_snapshots, shared_only)))

    async def of_conversation(self, conversation: int) -> MovableSnapshot | None:
        """Return the last snapshot of a conversation, for a copy at another node, once the link of this node is idle.

        Returns:
            None if nothing is stored or shared, or the link is busy for longer than IDLE_WAIT_S.

        Raises:
            EngineFailed: The engine is not ready.
        """
        exchange = self._exchange()
        if exchange is None or not await self._is_link_idle(exchange, time.monotonic() + IDLE_WAIT_S):
            return None
        return await self._thread.call(lambda core: core.movable.of_conversation(conversation))

    async def copy(self, address: str, snapshot: MovableSnapshot, timeout_s: float) -> TakenOver:
        """Fetch a copy of a conversation that goes on living at its node, while the link of this node is idle.

        Args:
            address: `host:port` of its node's server of snapshots.
            snapshot: Its last snapshot.
            timeout_s: Seconds for the wait and the transfer.

        Raises:
            EngineFailed: The engine is not ready, or shares nothing.
        """
        until_s, exchange = time.monotonic() + timeout_s, self._exchange()
        if exchange is not None and not await self._is_link_idle(exchange, until_s):
            self._refused["deadline"] += 1
            return TakenOver(1, refused={"deadline": 1})
        left_s, guest = until_s - time.monotonic(), replace(snapshot, residence=None)
        return await self.take(
            address,
            [guest],
            left_s,
            "replica",
            may_go_on=lambda: exchange is not None and not exchange.client.is_awaited,
        )

    async def take(
        self,
        address: str,
        snapshots: Sequence[MovableSnapshot],
        timeout_s: float,
        purpose: Purpose = "drain",
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> TakenOver:
        """Fetch snapshots from another node, in the given order, until the time is over.

        Args:
            address: `host:port` of its server of snapshots.
            snapshots: What it offers, the best first.
            timeout_s: Seconds for all of them, those of other take-overs before this one included.
            purpose: For the counters.
            may_go_on: Asked every LOOK_S during a transfer; False ends it, and the take-over.

        Raises:
            EngineFailed: The engine is not ready, or shares nothing.
        """
        if self._is_leaving():
            self._refused["draining"] += len(snapshots)
            return TakenOver(len(snapshots), refused={"draining": len(snapshots)})
        until_s, is_urgent = time.monotonic() + timeout_s, purpose == "drain"

        def goes_on() -> bool:
            return may_go_on() and not self._is_leaving() and (is_urgent or not self._num_urgent)

        taking = Taking(self._thread, self._exchange(), address, until_s, goes_on)
        self._num_urgent += is_urgent
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
            try:
                await taking.take_all(snapshots)
            finally:
                self._turn.release()
        except TimeoutError:
            taking.refused["deadline"] += len(snapshots)
        finally:
            self._num_urgent -= is_urgent
        taken = TakenOver(
            len(snapshots),
            taking.num_taken,
            taking.num_files,
            taking.num_bytes,
            time.monotonic() - until_s + timeout_s,
            dict(taking.refused),
        )
        self._note(taken, purpose, address)
        return taken

    def _note(self, taken: TakenOver, purpose: Purpose, address: str) -> None:
        self._num_files[purpose] += taken.num_files
        self._num_bytes[purpose] += taken.num_bytes
        self._refused.update(taken.refused)
        level = logging.DEBUG if purpose == "replica" else logging.INFO  # one per turn
        log.log(level, "taken over from %s (%s): %s", address, purpose, taken)

    def warm_up(self, sources: Sequence[tuple[str, Sequence[MovableSnapshot]]]) -> None:
        """Begin to take the first MAX_WARM prefixes over whenever the engine is idle; only once in its life.

        Args:
            sources: Addresses of nodes, each with what it offers.
        """
        if self._warming is None and self._exchange() is not None:
            self._warming = asyncio.ensure_future(self._warm_up(sources))

    async def close(self) -> None:
        """End the warm-up."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})

    def status(self) -> dict[str, dict[str, int]]:
        """Return the files and bytes taken over by purpose, and the snapshots that were not, by reason."""
        return {
            "taken_over": dict(self._num_files),
            "taken_over_bytes": dict(self._num_bytes),
            "not_taken_over": dict(self._refused),
        }

    async def _is_link_idle(self, exchange: SnapshotExchange, until_s: float) -> bool:
        """Wait until nothing is transferred here; return False if the time is over before."""
        while self._turn.locked() or not exchange.is_idle:
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _warm_up(self, sources: Sequence[tuple[str, Sequence[MovableSnapshot]]]) -> None:
        try:
            until_s, left = time.monotonic() + WARM_FOR_S, self._bounded(sources)
            while left and time.monotonic() < until_s:
                if not self._is_idle() or self._num_urgent:
                    await asyncio.sleep(LOOK_S)
                    continue
                address, snapshot = left[0]
                taken = await self.take(
                    address, [snapshot], until_s - time.monotonic(), "warm_up", may_go_on=self._is_idle
                )
                if "stopped" not in taken.refused:
                    left.pop(0)
        except EngineFailed as error:
            log.info("the engine does not warm itself any more: %s", error)
        except Exception:
            log.exception("the engine could not warm itself")

    def _bounded(self, sources: Sequence[tuple[str, Sequence[MovableSnapshot]]]) -> list[tuple[str, MovableSnapshot]]:
        """Return the first prefixes of the sources that fit into their share of the disk tier."""
        exchange = self._exchange()
        room = 0 if exchange is None else int(WARM_SHARE * exchange.max_bytes)
        chosen = list[tuple[str, MovableSnapshot]]()
        for address, snapshots in sources:
            for snapshot in snapshots:
                if len(chosen) < MAX_WARM and snapshot.num_bytes <= room:
                    chosen.append((address, snapshot))
                    room -= snapshot.num_bytes
        return chosen


class Taking:
    """One take-over.

    Args:
        thread: The engine's thread.
        exchange: The exchange with other nodes.
        address: See SnapshotTakeOver.take.
        until_s: When it ends; monotonic seconds.
        may_go_on: See SnapshotTakeOver.take.

    Attributes:
        num_taken: Snapshots that are here.
        num_files: Files that were transferred.
        num_bytes: Their bytes, those of incomplete ones included.
        refused: Snapshots that are not here, by NotTaken.

    Raises:
        EngineFailed: There is no exchange.
    """

    def __init__(
        self,
        thread: AsyncDeviceThread[EngineCore],
        exchange: SnapshotExchange | None,
        address: str,
        until_s: float,
        may_go_on: Callable[[], bool],
    ):
        if exchange is None:
            raise EngineFailed("this node shares no snapshots: prefix_cache.disk is not set, or fetch is off")
        self._thread = thread
        self._client = exchange.client
        self._max_bytes = exchange.max_bytes
        self._address = address
        self._until_s = until_s
        self._may_go_on = may_go_on
        self.num_taken = self.num_files = self.num_bytes = 0
        self.refused: Counter[str] = Counter()

    async def take_all(self, snapshots: Sequence[MovableSnapshot]) -> None:
        """Take snapshots over, in their order, while the engine's thread works; it is waited for at both ends alone.

        Raises:
            EngineFailed: The engine is not ready.
        """
        here, densities = await self._thread.call(
            lambda core: (core.movable.densities(), [core.movable.density(one) for one in snapshots])
        )
        adopting, stopped = list[tuple[Fetched, asyncio.Future[bool]]](), None
        for snapshot, density in zip(snapshots, densities, strict=True):
            if stopped is None and self._until_s <= time.monotonic():
                stopped = "deadline"
            if stopped is not None:
                self.refused[stopped] += 1
                continue
            is_here = snapshot.digest in here
            fetched = Fetched(None) if is_here else await self._fetched(snapshot, here, density)
            self.num_files += fetched.num_snapshots
            self.num_bytes += fetched.num_bytes
            last = snapshot.digest if fetched.failure is None else fetched.last
            adopted = self._thread.call(partial(_adopted, snapshot=snapshot, last=last))
            adopting.append((fetched, asyncio.ensure_future(adopted)))
            if fetched.failure in (*HOPELESS, "stopped"):
                stopped = self._reason(fetched)
        for fetched, adopted in adopting:
            if await adopted:
                self.num_taken += 1
            else:
                self.refused[self._reason(fetched)] += 1

    def _reason(self, fetched: Fetched) -> NotTaken:
        """Return why a snapshot is not here."""
        if fetched.failure == "stopped" and self._until_s <= time.monotonic():
            return "deadline"
        return fetched.failure or "gone"  # the file that has arrived was evicted

    async def _fetched(self, snapshot: MovableSnapshot, here: Mapping[str, float], density: float) -> Fetched:
        used_ns = time.time_ns() - int(1e9 * snapshot.idle_s)
        standing = Standing(used_ns, partial(_is_spared, here=here, density=density))
        patient_until_s = min(self._until_s, time.monotonic() + BUSY_FOR_S)
        while True:
            fetch = self._client.fetch(self._address, snapshot.digest, snapshot.num_tokens, self._max_bytes, standing)
            fetched = await self._ended(fetch)
            if fetched.failure != "busy" or patient_until_s <= time.monotonic() + BUSY_S or not self._may_go_on():
                return fetched
            await asyncio.sleep(BUSY_S)

    async def _ended(self, fetch: Fetch) -> Fetched:
        """Wait for the end of a transfer, and end it when it may not go on."""
        done = asyncio.wrap_future(fetch.done)
        try:
            while not done.done() and self._may_go_on() and (left_s := self._until_s - time.monotonic()) > 0:
                await asyncio.wait({done}, timeout=min(left_s, LOOK_S))
        finally:
            fetch.stop()  # without an effect on one that has ended
        return await asyncio.shield(done)


def _adopted(core: EngineCore, snapshot: MovableSnapshot, last: str) -> bool:
    return core.movable.arrived(snapshot, last)


def _is_spared(file: StoredFile, here: Mapping[str, float], density: float) -> bool:
    """Return whether a file must not be evicted for a snapshot of this density: also if its own is unknown."""
    return file.meta is None or MARGIN * here.get(file.digest, float("inf")) > density
