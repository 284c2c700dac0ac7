"""NodeRouter: routes a request to the replica on the node that the caller names, else by the deployment's default."""

import asyncio
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from ray.exceptions import ActorUnavailableError
from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.replica_choice import (
    NODE_SESSION,
    PIN_WAIT_S,
    QUESTION_SESSION,
    Choice,
    NoOtherReplica,
    NoReplica,
    NoReplicaYet,
)

FIRST_WAIT_S = 5.0
"""Time after a router's creation in which it waits for the first replica; it learns of running ones with a delay."""

PROBE_WAIT_S = 0.25
"""Longest wait for the load of replicas with an unknown or old load while other replicas could take the request."""

LOAD_AGE_S = 1.0
"""Age of a load after which it is probed again where replicas are compared: callers on other nodes change it too, and a
replica that is not chosen reports nothing."""

SLOT_TIMEOUT_S = 5.0
"""Longest wait for a slot to be reserved or released, which takes milliseconds unless the node is unreachable."""


@dataclass(frozen=True)
class Target:
    """The set of replicas that may take a request."""

    node_id: str | None
    """The only permitted node; None: any."""
    pin_wait_s: float | None
    """Longest wait for a replica on `node_id`; None: no limit."""
    choice: Choice

    def among(self, replicas: Iterable[RunningReplica]) -> list[RunningReplica]:
        permitted = [
            replica
            for replica in replicas
            if (self.node_id is None or replica.node_id == self.node_id)
            and replica.replica_id.unique_id not in self.choice.excluded
        ]
        return [replica for replica in permitted if replica.node_id == self.choice.node_id] or permitted


class BoundedReplica(RunningReplica):
    """Reserves and releases slots with a deadline, without which an unreachable node would block its callers."""

    async def reserve_slot(self, request_metadata: Any) -> Any:
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                return await super().reserve_slot(request_metadata)
        except TimeoutError:  # Ray releases the slot, and the router chooses again
            late = f"no slot of {self.replica_id} was reserved within {SLOT_TIMEOUT_S:g} s"
            raise ActorUnavailableError(late, self.actor_id.binary()) from None

    async def release_slot(self, slot_token: str) -> int:
        """Release a slot. The deadline limits only the wait for the confirmation; the release is sent in any case."""
        async with asyncio.timeout(SLOT_TIMEOUT_S):
            return await super().release_slot(slot_token)


class NodeRouter(LocalityMixin, RequestRouter):
    """Request router that can pin a request to a node.

    Without a pin a request goes to the least loaded replica. With `local_default` it stays on the caller's node; with
    `local_first` the caller's node is preferred, and other nodes serve it if that node has no replica with a free slot.

    The router runs in the process of the caller, and each request chooses in its own task. Ray itself shares a limited
    number of tasks between all requests (2.60: two per replica), so a few requests that wait for one node would block
    the requests for all other nodes, and it matches requests by an id that all calls of one HTTP request share.

    A request for a node without a replica waits for a change of the replica set and fails with NoReplica after its
    wait time. Requests with equal targets are served in order of arrival, so that only one of them probes the load
    while all replicas of the target are full.
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
        self._heard_at: dict[ReplicaID, float] = {}  # when a load was last reported, on the monotonic clock

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return BoundedReplica(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._has_had_replicas = self._has_had_replicas or bool(replicas)
        self._silent &= set(self.curr_replicas)
        self._heard_at = {one: at for one, at in self._heard_at.items() if one in self.curr_replicas}
        self._changed.set()
        self._changed = asyncio.Event()

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._heard_at[replica_id] = time.monotonic()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Never called: RequestRouter declares it, and `_choose_replica_for_request`, its caller, is overridden."""
        raise NotImplementedError

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return a replica with a free slot. Raises NoReplica.

        Ray calls this once per request, and again (is_retry) when the replica refuses.
        """
        session_id = pending_request.metadata.session_id or ""
        if session_id.startswith(QUESTION_SESSION):
            return self._on_node(session_id.removeprefix(QUESTION_SESSION))
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
                self.on_send_request(chosen.replica_id)  # counts until the reservation brings the replica's load
                return chosen

    def _on_node(self, node_id: str) -> RunningReplica:
        found = next((replica for replica in self.curr_replicas.values() if replica.node_id == node_id), None)
        if found is None:
            raise NoReplica(f"node {node_id} has no replica of {self._deployment_id.name}")
        return found

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
        """Wait until a replica exists that may take the request. Raises NoReplica after the wait time.

        Args:
            target: Replicas that may take the request.
            deadline: Event loop time; None: no limit.
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
        """Wait until the replica set changes; return False after timeout_s."""
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _until_one_has_room(self, target: Target, request: PendingRequest) -> RunningReplica | None:
        """Wait until a replica has a free slot and return the best one; None if no replica may take the request now."""
        attempt = 0
        while candidates := target.among(self.curr_replicas.values()):
            await self._hear_loads(self._to_probe(candidates), PROBE_WAIT_S)
            if ranked := self._with_room(target, candidates, request):
                return ranked[0]
            if attempt:
                await self._backoff(attempt - 1)
            attempt += 1
            await self._hear_loads(candidates, self.queue_len_response_deadline_s + PROBE_WAIT_S, silent_too=True)
            if ranked := self._with_room(target, target.among(self.curr_replicas.values()), request):
                return ranked[0]
        return None

    def _to_probe(self, candidates: Sequence[RunningReplica]) -> list[RunningReplica]:
        """Return the replicas with an unknown load, and of several those with an old one."""
        oldest = time.monotonic() - LOAD_AGE_S if len(candidates) > 1 else float("-inf")
        return [
            replica
            for replica in candidates
            if self._load(replica) is None or self._heard_at.get(replica.replica_id, float("-inf")) < oldest
        ]

    async def _hear_loads(self, replicas: list[RunningReplica], timeout_s: float, silent_too: bool = False) -> None:
        """Probe replicas for their load.

        Args:
            replicas: Replicas to probe.
            timeout_s: Longest wait for the answers.
            silent_too: Whether to wait also for replicas that did not answer the last probe.
        """
        asked = {replica.replica_id: self._probe(replica) for replica in replicas}
        awaited = [task for replica_id, task in asked.items() if silent_too or replica_id not in self._silent]
        if awaited:
            await asyncio.wait(awaited, timeout=timeout_s)

    def _probe(self, replica: RunningReplica) -> asyncio.Task[Any]:
        """Return the pending probe of a replica, starting one if there is none."""
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
            self._heard_at[replica.replica_id] = time.monotonic()

    def _with_room(
        self, target: Target, candidates: Sequence[RunningReplica], request: PendingRequest
    ) -> list[RunningReplica]:
        """Return the replicas with a known load below their limit, best first.

        A replica with an unknown load is left out: an engine that does not answer must not look idle.
        """
        loads = {r.replica_id: load for r in candidates if (load := self._load(r)) is not None}
        room = [r for r in candidates if r.replica_id in loads and loads[r.replica_id] < r.max_ongoing_requests]
        ranked = by_load(room, loads, request.metadata.internal_request_id)
        if self._local_first:
            ranked.sort(key=lambda r: r.node_id != self._self_node_id)
        ranked.sort(key=lambda r: r.replica_id.unique_id in target.choice.last)
        return ranked

    def _load(self, replica: RunningReplica) -> int | None:
        """Return the last known number of ongoing requests of a replica; None if it is outdated."""
        return self.replica_queue_len_cache.get(replica.replica_id)


def by_load(replicas: Sequence[RunningReplica], loads: dict[ReplicaID, int], key: str) -> list[RunningReplica]:
    """Sort replicas by load. Ties are ordered by rendezvous hashing: stable per key, uniform over keys."""

    def rank(replica: RunningReplica) -> tuple[int, bytes]:
        digest = hashlib.blake2b(f"{key}|{replica.replica_id.unique_id}".encode(), digest_size=8).digest()
        return loads[replica.replica_id], digest

    return sorted(replicas, key=rank)
