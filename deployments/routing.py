"""Which replica gets a request: the one on the node that the caller names, or else by this deployment's default."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

NODE_SESSION = "node:"
"""A handle with the session id `node:<node id>` reaches the replica on that node, or waits until there is one."""


class NodeRouter(LocalityMixin, RequestRouter):
    """`local_default`: a request that names no node stays on the caller's node; otherwise the least loaded replica.
    `local_first`: the same, but where the caller's node has no replica, or a full one, the others do as well.

    Runs in the process of the caller. Without a replica that may take the request, it waits without limit.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._local_default: bool = kwargs.get("local_default", False)
        self._local_first: bool = kwargs.get("local_first", False)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        session_id = pending_request.metadata.session_id or ""
        if session_id.startswith(NODE_SESSION):
            return [on_node(candidate_replicas, session_id.removeprefix(NODE_SESSION))]
        if self._local_default and self._self_node_id:
            return [on_node(candidate_replicas, self._self_node_id)]
        loads = {r.replica_id: self._replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas}
        ranked = by_load(candidate_replicas, loads, pending_request.metadata.internal_request_id)
        if self._local_first:
            ranked.sort(key=lambda r: r.node_id != self._self_node_id)
        return [[r] for r in ranked]

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Gives the replica to the request for which this very task looked for one.

        Ray 2.60 looks the request up by the id that all handle calls of one HTTP request share, so that of several
        concurrent calls to one deployment all but one would wait for ever.
        """
        me = asyncio.current_task()
        for pending in self._pending_requests_to_fulfill:
            if self._routing_task_by_pending_request_future.get(pending.future) is me and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return


def on_node(replicas: Sequence[RunningReplica], node_id: str) -> list[RunningReplica]:
    return [r for r in replicas if r.node_id == node_id]


def by_load(replicas: Sequence[RunningReplica], loads: dict[ReplicaID, int], key: str) -> list[RunningReplica]:
    """Least loaded first. Equals are ordered by rendezvous hashing: the same for the same key, even over all keys."""

    def rank(replica: RunningReplica) -> tuple[int, bytes]:
        digest = hashlib.blake2b(f"{key}|{replica.replica_id.unique_id}".encode(), digest_size=8).digest()
        return loads[replica.replica_id], digest

    return sorted(replicas, key=rank)
