"""HandOver: which engine takes which snapshots over, when a node leaves the cluster or has joined it.

The engines transfer them among each other, see engine/take_over.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.dispatch.placer import Placer
from deployments.engine_ids import node_of
from deployments.ray_internals import running_nodes
from deployments.requests import EngineAnswer, SilentEngine
from engine.placement import MovableSnapshot, TakenOver

log = logging.getLogger("ray.serve")

MAX_SNAPSHOTS = 512
"""The most snapshots that a node hands over; each brings its ancestors along."""

MARGIN_S = 10.0
"""Time beyond the deadline for the engines to answer: they end the running step first."""

MAX_SHARED, NUM_NEIGHBOURS = 8, 3
"""The most shared prefixes that each of so many nodes is asked for by one that has joined."""

LOOK_S = 2.0
"""Interval between two looks at whether this node has a new engine."""

Ask = Callable[..., Awaitable[EngineAnswer[Any] | SilentEngine]]
"""Calls a method of the engine on a node: method, node, its arguments; `timeout_s` is the longest wait."""


class HandOver:
    """Moves snapshots between the engines of one application.

    Args:
        engines: Handle of the engines.
        placer: Knows where the requests of a conversation go.
        ask: Calls engines.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, engines: DeploymentHandle, placer: Placer, ask: Ask, clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self._engines = engines
        self._placer = placer
        self._ask = ask

    async def leave(self, engine_ids: Sequence[str], timeout_s: float, without: Iterable[str] = ()) -> TakenOver:
        """Hand over what drained engines know to others, the most valuable part first.

        Args:
            engine_ids: The engines, which take no requests any more.
            timeout_s: Seconds until the receivers stop.
            without: Engines that get nothing either.

        Returns:
            What they have got; nothing of an engine that shares no snapshots, or does not answer.
        """
        leaving = (self._leave(one, frozenset({*engine_ids, *without}), timeout_s) for one in engine_ids)
        return reduce(add, await asyncio.gather(*leaving), TakenOver())

    async def _leave(self, engine_id: str, drained: frozenset[str], timeout_s: float) -> TakenOver:
        address = self._placer.address_of(engine_id)
        if not address or timeout_s <= 0:
            return TakenOver()
        until_s = self._clock() + timeout_s
        offered = await self._ask("movable_snapshots", engine_id, MAX_SNAPSHOTS, timeout_s=timeout_s)
        if isinstance(offered, SilentEngine):
            return TakenOver()
        left, without, total = list[MovableSnapshot](offered.answer), drained, TakenOver()
        while successors := self._placer.successors(left, without):
            left_s = max(0.0, until_s - self._clock())
            said = await asyncio.gather(*(self._take(one, address, each, left_s) for one, each in successors.items()))
            total = reduce(add, filter(None, said), total)
            unable = [one for one, taken in zip(successors, said, strict=True) if taken is None]
            left, without = [each for one in unable for each in successors[one]], without | set(unable)
        return total + TakenOver(len(left), refused={"no_receiver": len(left)} if left else {})

    async def _take(
        self, node_id: str, address: str, snapshots: list[MovableSnapshot], timeout_s: float
    ) -> TakenOver | None:
        """Let the engine on a node take snapshots over; None if it does not answer, or is drained itself."""
        said = await self._ask("take_over", node_id, address, snapshots, timeout_s, timeout_s=timeout_s + MARGIN_S)
        if isinstance(said, SilentEngine) or said.answer.refused.get("draining"):
            return None
        return said.answer

    async def keep_warm(self, node_id: str) -> None:
        """Warm each new engine of a node by what its neighbours know, for the life of this process. Never raises."""
        warmed = set[str]()
        while True:
            try:
                found = [one for one in running_nodes(self._engines) or () if node_of(one.node_id) == node_id]
                if found:
                    warmed &= {one.replica_id for one in found}
                for one in found:
                    if one.replica_id not in warmed:
                        warmed.add(one.replica_id)  # also if it fails: the others are warmed at the next look
                        await self._warm_up(one.node_id)
            except Exception:
                log.exception("an engine of this node could not be warmed")
            await asyncio.sleep(LOOK_S)

    async def _warm_up(self, node_id: str) -> None:
        """Tell the engine of a node which prefixes its neighbours share."""
        neighbours = self._placer.neighbours(node_id, NUM_NEIGHBOURS)
        asking = (self._ask("movable_snapshots", one, MAX_SHARED, True) for one in neighbours)
        said = await asyncio.gather(*asking)
        best: dict[str, tuple[str, MovableSnapshot]] = {}
        for neighbour, answer in zip(neighbours, said, strict=True):
            for snapshot in answer.answer if isinstance(answer, EngineAnswer) else ():
                before = best.get(snapshot.digest)
                if before is None or before[1].rate < snapshot.rate:
                    best[snapshot.digest] = self._placer.address_of(neighbour), snapshot
        if hottest := sorted(best.values(), key=lambda one: -one[1].rate)[:MAX_SHARED]:
            await self._ask("warm_up", node_id, [(address, [snapshot]) for address, snapshot in hottest])
