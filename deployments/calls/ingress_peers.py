"""IngressPeers: all ingresses of the application, as one of them knows them. No message is sent without a question."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.calls.population import is_of_own_population
from deployments.calls.replica_calls import ask_replicas, call_within
from deployments.calls.replica_choice import pin_to
from deployments.http.answer_id import tag_of_node
from deployments.http.dialects import tag_in
from deployments.placement.rendezvous import Rendezvous
from deployments.ray_internals import running_replicas


class IngressPeers:
    """Calls other ingresses.

    Args:
        handle: Handle of the ingresses; None outside a replica: there are no others.
        node_id: Node of this ingress.
        replica_id: Unique id of this ingress.
    """

    def __init__(self, handle: DeploymentHandle | None, node_id: str, replica_id: str):
        self._handle = handle
        self.node_id = node_id
        self.replica_id = replica_id
        self._known: Mapping[Any, Any] | None = None
        self._num_known = 0
        self._order = Rendezvous({node_id: 1.0})
        self._tags: dict[str, list[str]] = {}
        self._replica_ids = {replica_id}

    def others_with_tag_of(self, answer_id: str) -> list[str]:
        """Return the other nodes whose ingress may have given an answer; [] if the id does not tell."""
        self._follow()
        tag = tag_in(answer_id)
        return [] if tag is None else [node_id for node_id in self._tags.get(tag, ()) if node_id != self.node_id]

    def home_of(self, key: int) -> str:
        """Return the node whose ingress counts for all of its population where one must, for a 64-bit key."""
        self._follow()
        return self._order.ranked(key, 1)[0]

    def is_running(self, replica_id: str) -> bool:
        """Tell whether an ingress runs, as far as this one knows."""
        self._follow()
        return replica_id in self._replica_ids

    async def ask(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        """Call a method of the ingress on another node.

        Raises:
            NoAnswer: There is no answer within timeout_s.
            Exception: Whatever the call raises.
        """
        assert self._handle is not None, "there is no other ingress"
        handle = self._handle.options(method_name=method, session_id=pin_to(node_id, 0.0))
        return await call_within(timeout_s, handle.remote(*args))

    async def ask_all(self, timeout_s: float, method: str, *args: Any) -> list[Any]:
        """Call a method of every ingress, this one included; None for one without an answer.

        Returns [] in Serve's local testing mode.
        """
        if self._handle is None:
            return []
        asked = await ask_replicas(self._handle, timeout_s, method, *args)
        return await asyncio.gather(*asked) or [None]  # this ingress is running, so [] means that none answered

    def _follow(self) -> None:
        replicas = running_replicas(self._handle)
        if replicas is None or (replicas is self._known and len(replicas) == self._num_known):
            return
        self._known, self._num_known = replicas, len(replicas)
        running = list(replicas.values())
        node_ids = {self.node_id, *(replica.node_id for replica in running)}
        self._replica_ids = {self.replica_id, *(replica.replica_id.unique_id for replica in running)}
        own = {replica.node_id for replica in running if is_of_own_population(replica.replica_metadata)}
        self._order = Rendezvous(dict.fromkeys({self.node_id, *own}, 1.0))
        self._tags = {}
        for node_id in sorted(node_ids):
            self._tags.setdefault(tag_of_node(node_id), []).append(node_id)
