"""SharedResponses: the responses of all ingresses. Each keeps those that it has answered, and asks for the others."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.http.config import HttpConfig
from deployments.http.response_store import ResponseStore, StoredResponse
from engine.errors import Unavailable

log = logging.getLogger("orchard.http")

ASK_TIMEOUT_S = 5.0
"""Longest wait for the ingress that keeps a response."""


class Peers(Protocol):
    """The other ingresses of the cluster."""

    def others_with_tag_of(self, answer_id: str) -> Sequence[str]:
        """Return the other nodes whose ingress may have given an answer; [] if the id does not tell."""
        ...

    async def ask(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        """Call a method of the ingress on another node."""
        ...


class Running(Protocol):
    """The encoder of a response in progress."""

    is_stored: bool

    def response(self, status: str) -> dict[str, Any]:
        """Return the response with the items so far."""
        ...


@dataclass(frozen=True)
class RunningResponse:
    """A response in progress."""

    body: dict[str, Any]
    is_stored: bool
    """Whether it can be read before its end, and will be stored then."""

    def cancelled(self) -> dict[str, Any]:
        """Return the response as it is once it has been cancelled."""
        output = [
            {**item, "status": "incomplete"} if item.get("status") == "in_progress" else item
            for item in self.body["output"]
        ]
        return {**self.body, "status": "cancelled", "output": output}


class SharedResponses:
    """Finds and deletes responses wherever they are.

    The id of a response names its ingress, so that mostly one other is asked, and none about ids that no ingress makes.

    Args:
        config: Limits of the store of this ingress.
        peers: The other ingresses; None: there are none.

    Attributes:
        store: Responses that this ingress has answered.
    """

    def __init__(self, config: HttpConfig, peers: Peers | None = None):
        self.store = ResponseStore(
            config.stored_responses_max, config.stored_responses_mb * 2**20, config.stored_responses_ttl_s
        )
        self._peers = peers
        self._running: dict[str, tuple[str, Running]] = {}

    def begin(self, owner: str, id: str, encoder: Running) -> None:
        """Note a response in progress at this ingress."""
        self._running[id] = owner, encoder

    def end(self, id: str) -> None:
        """Forget a response in progress, if there is one with this id."""
        self._running.pop(id, None)

    def find_here(self, owner: str, id: str) -> StoredResponse | RunningResponse | None:
        """Return a response of this ingress, and mark it as used; None if this owner has none."""
        if (stored := self.store.get(owner, id)) is not None:
            return stored
        running_owner, encoder = self._running.get(id, (None, None))
        if encoder is None or running_owner != owner:
            return None
        return RunningResponse(encoder.response("in_progress"), encoder.is_stored)

    async def find(self, owner: str, id: str) -> StoredResponse | RunningResponse | None:
        """Return a response and mark it as used. Raises Unavailable."""
        return self.find_here(owner, id) or await self._ask(id, "find_response", owner)

    async def stored(self, owner: str, id: str) -> StoredResponse | None:
        """Return a complete response and mark it as used. Raises Unavailable."""
        found = await self.find(owner, id)
        return found if isinstance(found, StoredResponse) else None

    async def delete(self, owner: str, id: str) -> bool:
        """Delete a stored response; return False if there is none of this owner. Raises Unavailable."""
        return self.store.delete(owner, id) or bool(await self._ask(id, "delete_response", owner))

    async def _ask(self, id: str, method: str, owner: str) -> Any:
        if self._peers is None:
            return None
        silent: list[str] = []
        for node_id in self._peers.others_with_tag_of(id):
            try:
                if (answer := await self._peers.ask(node_id, ASK_TIMEOUT_S, method, owner, id)) not in (None, False):
                    return answer
            except Exception as error:
                log.info("node %s did not answer about the response %s: %r", node_id, id, error)
                silent.append(node_id)
        if silent:
            raise Unavailable(f"The response {id} is stored on node {silent[0]}, which did not answer.")
        return None
