"""Which replica gets a request: the one on the node that the caller names, or else by this deployment's default."""

import asyncio
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from ray.exceptions import ActorUnavailableError
from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.replica_choice import NODE_SESSION, PIN_WAIT_S, Choice, NoOtherReplica, NoReplica, NoReplicaYet

FIRST_WAIT_S = 5.0
"""A router hears of the running replicas a moment after it is made. For so long after that it waits for the first."""

PROBE_WAIT_S = 0.25
"""How long a request waits to hear the load of replicas whose load is not known, when others could take it."""

SLOT_TIMEOUT_S = 5.0
"""A replica reserves and releases slots within milliseconds; its node may be unreachable without Ray knowing it yet."""


@dataclass(frozen=True)
class Target:
    """Which replicas may take a request."""

    node_id: str | None
    """The only node, or None for any."""
    pin_wait_s: float | None
    """How long a replica on `node_id` is waited for, in seconds; None for ever."""
    choice: Choice

    def among(self, replicas: Iterable[RunningReplica]) -> list[RunningReplica]:
        return [
            replica
            for replica in replicas
            if (self.node_id is None or replica.node_id == self.node_id)
            and replica.replica_id.unique_id not in self.choice.excluded
        ]


class BoundedReplica(RunningReplica):
    """Reserves and releases slots with a deadline: without one, an unreachable node would hold its callers."""

    async def reserve_slot(self, request_metadata: Any) -> Any:
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                return await super().reserve_slot(request_metadata)
        except TimeoutError:  # Ray has sent the release of the slot; the router chooses again
            late = f"no slot of {self.replica_id} was reserved within {SLOT_TIMEOUT_S:g} s"
            raise ActorUnavailableError(late, self.actor_id.binary()) from None

    async def release_slot(self, slot_token: str) -> int:
        """The release is sent in any case; what has a deadline is the wait for the replica's confirmation."""
        async with asyncio.timeout(SLOT_TIMEOUT_S):
            return await super().release_slot(slot_token)


class NodeRouter(LocalityMixin, RequestRouter):
    """`local_default`: a request that names no node stays on the caller's node; otherwise the least loaded replica.
    `local_first`: the same, but where the caller's node has no replica, or a full one, the others do as well.

    Runs in the process of the caller, and each request chooses in its own task. Ray would let a limited number of
    tasks choose for all requests (2.60: twice as many as there are replicas), so that a few requests that wait for one
    node would stop those for all others, and it would look requests up by an id that all calls of one HTTP request
    share.

    A request for a node without a replica waits on the set of replicas, not in a loop, and fails with NoReplica when
    its time is over. Requests with equal targets take turns, in the order in which they came: when all replicas of a
    target are full, one request asks them for their load, not all.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._local_default: bool = kwargs.get("local_default", False)
        self._local_first: bool = kwargs.get("local_first", False)
        self._first_wait_s: float = kwargs.get("first_wait_s", FIRST_WAIT_S)
        self._made_at = time.monotonic()
        self._has_had_replicas = False
        self._changed = asyncio.Event()
        self._turns: WeakValueDictionary[Target, asyncio.Lock] = WeakValueDictionary()
        self._probes: dict[ReplicaID, asyncio.Task[Any]] = {}
        self._silent: set[ReplicaID] = set()

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return BoundedReplica(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._has_had_replicas = self._has_had_replicas or bool(replicas)
        self._silent &= set(self.curr_replicas)
        self._changed.set()
        self._changed = asyncio.Event()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Those with room, best first; see RequestRouter."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        target = self._target(pending_request)
        ranked = self._with_room(target, target.among(candidate_replicas), pending_request)
        return [[replica] for replica in ranked]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return a replica that has room. Raises NoReplica.

        Ray calls it for each request, and again (is_retry) when the replica has refused.
        """
        target = self._target(pending_request)
        loop = asyncio.get_running_loop()
        deadline = None if target.pin_wait_s is None else loop.time() + target.pin_wait_s
        while True:
            await self._until_there_is_one(target, deadline)
            async with self._turns.setdefault(target, asyncio.Lock()):
                chosen = await self._until_one_has_room(target, pending_request)
            if chosen is not None:
                waited_s = time.time() - pending_request.created_at
                self.queue_wait_time_ms_histogram.observe(1000 * max(0.0, waited_s))
                return chosen

    def _target(self, pending_request: PendingRequest) -> Target:
        session_id = pending_request.metadata.session_id or ""
        choice = pending_request.kwargs.get("choice")
        choice = choice if isinstance(choice, Choice) else Choice()
        if session_id.startswith(NODE_SESSION):
            node_id, _, wait_s = session_id.removeprefix(NODE_SESSION).partition("@")
            return Target(node_id, float(wait_s) if wait_s else PIN_WAIT_S, choice)
        if self._local_default and self._self_node_id:
            return Target(self._self_node_id, None, choice)
        return Target(None, None, choice)

    async def _until_there_is_one(self, target: Target, deadline: float | None) -> None:
        """Return when a replica may take the request. Raises NoReplica when none is waited for any longer.

        deadline: on the clock of the event loop.
        """
        while not target.among(self.curr_replicas.values()):
            if not self._has_had_replicas:
                first_wait_s = self._made_at + self._first_wait_s - time.monotonic()
                if not await self._changes_within(first_wait_s):
                    raise NoReplicaYet(f"no replica of {self._deployment_id.name} has been running yet")
            elif not target.choice.waits:
                raise NoOtherReplica(f"there is no other replica of {self._deployment_id.name}")
            elif deadline is None:
                await self._changed.wait()
            elif not await self._changes_within(deadline - asyncio.get_running_loop().time()):
                raise NoReplica(
                    f"node {target.node_id} has had no replica of {self._deployment_id.name} "
                    f"for {target.pin_wait_s:g} s"
                )

    async def _changes_within(self, timeout_s: float) -> bool:
        """Whether the set of replicas changes in that time."""
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _until_one_has_room(self, target: Target, request: PendingRequest) -> RunningReplica | None:
        """The best replica that has room; None when none may take the request any more."""
        attempt = 0
        while candidates := target.among(self.curr_replicas.values()):
            await self._hear_loads([r for r in candidates if self._load(r) is None], PROBE_WAIT_S)
            if ranked := self._with_room(target, candidates, request):
                return ranked[0]
            if attempt:
                await self._backoff(attempt - 1)
            attempt += 1
            await self._hear_loads(candidates, self.queue_len_response_deadline_s + PROBE_WAIT_S, silent_too=True)
            if ranked := self._with_room(target, target.among(self.curr_replicas.values()), request):
                return ranked[0]
        return None

    async def _hear_loads(self, replicas: list[RunningReplica], timeout_s: float, silent_too: bool = False) -> None:
        """Ask replicas for their load. One that gave no answer the last time is asked, but not waited for.

        silent_too: such a one is waited for as well.
        """
        asked = {replica.replica_id: self._probe(replica) for replica in replicas}
        awaited = [task for replica_id, task in asked.items() if silent_too or replica_id not in self._silent]
        if awaited:
            await asyncio.wait(awaited, timeout=timeout_s)

    def _probe(self, replica: RunningReplica) -> asyncio.Task[Any]:
        """The one question that is under way to this replica."""
        if replica.replica_id not in self._probes:
            task = asyncio.ensure_future(self._ask_load(replica))
            self._probes[replica.replica_id] = task
            task.add_done_callback(lambda _: self._probes.pop(replica.replica_id, None))
        return self._probes[replica.replica_id]

    async def _ask_load(self, replica: RunningReplica) -> None:
        ((_, load),) = await self._probe_queue_lens([replica], 0)
        if load is None and replica.replica_id in self.curr_replicas:
            self._silent.add(replica.replica_id)
        else:
            self._silent.discard(replica.replica_id)

    def _with_room(
        self, target: Target, candidates: Sequence[RunningReplica], request: PendingRequest
    ) -> list[RunningReplica]:
        """Those whose load is known and below their limit, best first.

        A load that is not known is no room: an engine that does not answer must not look idle.
        """
        loads = {r.replica_id: load for r in candidates if (load := self._load(r)) is not None}
        room = [r for r in candidates if r.replica_id in loads and loads[r.replica_id] < r.max_ongoing_requests]
        ranked = by_load(room, loads, request.metadata.internal_request_id)
        if self._local_first:
            ranked.sort(key=lambda r: r.node_id != self._self_node_id)
        ranked.sort(key=lambda r: r.replica_id.unique_id in target.choice.last)
        return ranked

    def _load(self, replica: RunningReplica) -> int | None:
        """Ongoing requests of a replica as last heard, None if that is too long ago."""
        return self.replica_queue_len_cache.get(replica.replica_id)


def by_load(replicas: Sequence[RunningReplica], loads: dict[ReplicaID, int], key: str) -> list[RunningReplica]:
    """Least loaded first. Equals are ordered by rendezvous hashing: the same for the same key, even over all keys."""

    def rank(replica: RunningReplica) -> tuple[int, bytes]:
        digest = hashlib.blake2b(f"{key}|{replica.replica_id.unique_id}".encode(), digest_size=8).digest()
        return loads[replica.replica_id], digest

    return sorted(replicas, key=rank)
