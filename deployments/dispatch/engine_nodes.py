"""EngineNodes: the engines that run, as one ingress knows them, and the choice among them without quotes."""

import asyncio
import random
import time
from collections.abc import Callable, Collection

from ray.serve.handle import DeploymentHandle

from deployments.calls.population import among, is_of_own_population, is_understood
from deployments.calls.replica_choice import NoOtherReplica, NoReplicaYet
from deployments.ray_internals import RunningNode, running_nodes

FIRST_WAIT_S = 5.0
"""Time in which an ingress waits for the first engine; it learns of running ones with a delay."""

LOOKED_EVERY_S = 0.05
"""Time between two looks for an engine while there is none."""


class EngineNodes:
    """Knows the running engines, and for a while those that refused a request or were lost.

    Args:
        engines: Handle of the engines.
        clock: Monotonic seconds.
        first_wait_s: Longest wait for the first engine.
    """

    def __init__(
        self,
        engines: DeploymentHandle,
        clock: Callable[[], float] = time.monotonic,
        first_wait_s: float = FIRST_WAIT_S,
    ):
        self._engines = engines
        self._clock = clock
        self._until: dict[str, float] = {}  # end of a refusal or loss, by unique id of the replica
        self._first_by_s = clock() + first_wait_s
        self._has_had_one = False

    @property
    def num(self) -> int:
        """The number of running engines that get this ingress' requests, as far as it is known."""
        return len(among(running_nodes(self._engines) or []))

    def note(self, replica_id: str, seconds: float) -> None:
        """Record that an engine refused a request or was lost. For this time it is chosen last."""
        self._until[replica_id] = self._clock() + seconds

    def forget(self, replica_id: str) -> None:
        """Choose an engine as before: it has accepted a request again."""
        self._until.pop(replica_id, None)

    def recent(self) -> frozenset[str]:
        """Return the unique ids of the noted engines whose time is not over."""
        now = self._clock()
        self._until = {replica_id: until for replica_id, until in self._until.items() if until > now}
        return frozenset(self._until)

    async def choose(
        self, without: Collection[str] = (), last: Collection[str] = (), node_id: str | None = None, waits: bool = True
    ) -> RunningNode:
        """Return the engine for a request, at random among those that are equally good.

        Those of other populations are chosen last, and never if they do not understand the messages of this one.

        Args:
            without: Unique ids of replicas that must not be chosen.
            last: Nodes whose engines are chosen only if there is no other, like the noted ones.
            node_id: The node whose engine is chosen if it may be.
            waits: Whether to wait for a new engine if all running ones are excluded.

        Raises:
            NoReplicaYet: No engine has run since this ingress started.
            NoOtherReplica: All running engines are excluded, and waits is false.
        """
        while True:
            running = running_nodes(self._engines) or []
            self._has_had_one = self._has_had_one or bool(running)
            if able := [one for one in running if one.replica_id not in without and is_understood(one.metadata)]:
                noted = self.recent()

                def rank(one: RunningNode, noted: frozenset[str] = noted) -> tuple[bool, bool, bool, float]:
                    is_last = one.replica_id in noted or one.node_id in last
                    return one.node_id != node_id, is_last, not is_of_own_population(one.metadata), random.random()

                return min(able, key=rank)
            if running and not waits:
                raise NoOtherReplica("there is no other engine")
            if not self._has_had_one and self._clock() > self._first_by_s:
                raise NoReplicaYet("no engine has been running yet")
            await asyncio.sleep(LOOKED_EVERY_S)
