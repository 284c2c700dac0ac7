"""NodeRouter: sends a call to the replica on the node that its caller names, else to the nearest replica."""

import asyncio
import random
import time
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter, RunningReplica

from deployments.calls.replica_choice import NoReplica, NoReplicaYet, pinned
from deployments.engine_ids import routing_id

FIRST_WAIT_S = 5.0
"""Time after a router's creation in which it waits for the first replica; it learns of running ones with a delay."""

FULL_WAIT_S = 0.05
"""Wait before a call is sent again that its replica has refused: max_ongoing_requests is reached."""


class NodeRouter(LocalityMixin, RequestRouter):
    """Request router of all deployments but the ingress. It knows of no load: who names the node has asked it.

    A call with a pin (`replica_choice.pin_to`) goes to the replica on that node, or to the engine with that id, and
    fails with NoReplica if there is none within its wait. Any other call goes to the caller's node if that has a
    replica, else to a random one.

    The router runs in the process of the caller, and each call chooses in its own task. Ray itself shares a limited
    number of tasks between all calls (2.60: two per replica), so a few calls that wait for one node would block the
    calls for all other nodes, and it matches calls by an id that all calls of one HTTP request share.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._first_wait_s: float = kwargs.get("first_wait_s", FIRST_WAIT_S)
        self._made_at = time.monotonic()
        self._has_had_replicas = False
        self._changed = asyncio.Event()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._has_had_replicas = self._has_had_replicas or bool(replicas)
        self._changed.set()
        self._changed = asyncio.Event()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Never called: RequestRouter declares it, and `_choose_replica_for_request`, its caller, is overridden."""
        raise NotImplementedError

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return the replica of a call. Raises NoReplica.

        Ray calls this once per call, and again (is_retry) when the replica refuses.
        """
        if is_retry:
            await asyncio.sleep(FULL_WAIT_S)
        node_id, wait_s = pinned(pending_request.metadata.session_id or "")
        began_at = time.monotonic()
        while (found := self._replica(node_id)) is None:
            name = self._deployment_id.name
            if not self._has_had_replicas:
                if not await self._changes_by(self._made_at + self._first_wait_s):
                    raise NoReplicaYet(f"no replica of {name} has been running yet")
            elif wait_s is None:
                await self._changed.wait()
            elif not await self._changes_by(began_at + wait_s):
                raise NoReplica(f"node {node_id} has had no replica of {name} for {wait_s:g} s")
        return found

    def _replica(self, node_id: str | None) -> RunningReplica | None:
        replicas = list(self.curr_replicas.values())
        if node_id is None:
            near = [replica for replica in replicas if replica.node_id == self._self_node_id]
            return random.choice(near or replicas) if replicas else None
        return next((one for one in replicas if routing_id(one.node_id, one.replica_metadata) == node_id), None)

    async def _changes_by(self, moment: float) -> bool:
        """Wait until the set of replicas changes; return False if it has not by the moment, in monotonic seconds."""
        try:
            async with asyncio.timeout(max(moment - time.monotonic(), 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
