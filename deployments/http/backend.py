"""Backend: the graph behind the HTTP API, as the endpoints see it."""

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.http.figures import HttpFigures
from deployments.http.generation import Generation
from deployments.http.in_flight import InFlight
from deployments.http.timeline import RequestTimeline, Timelines
from deployments.requests import ChatRequest, Embeddings, EmbedRequest, Route, ScoreRequest, Scores
from engine.placement import TakenOver

HAND_OVER_S = 60.0
"""Longest time for the snapshots of a drained node to move to others, unless the client names another."""


class Backend(Protocol):
    """The graph behind the HTTP API."""

    model_name: str
    max_context_tokens: int
    """Prompt and answer together."""
    in_flight: InFlight
    """Every request that generates is entered here."""
    figures: HttpFigures
    """Counts the answers."""
    timelines: Timelines
    """The timelines of the last requests at this ingress."""

    async def start(self, request: ChatRequest, route: Route) -> Generation:
        """Plan and dispatch a request. Returns at the first token, so that errors precede the response headers.

        Raises:
            OrchardError: The request is invalid or cannot be served.
        """
        ...

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Compute the embeddings of the prompts. The first error cancels the others. Raises OrchardError."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute the relevance of the documents. The first error cancels the other prompts. Raises OrchardError."""
        ...

    async def count_tokens(self, request: ChatRequest, route: Route) -> int:
        """Count the tokens of the rendered prompt, tools and images included. Raises OrchardError."""
        ...

    async def token_ids(self, request: ChatRequest, route: Route) -> list[int]:
        """Return the token ids of the prompt, image placeholders repeated. Raises OrchardError."""
        ...

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        """Decode token ids to text.

        Args:
            token_ids: Ids of the model's tokenizer.
            field: The client's field, for errors.

        Raises:
            InvalidRequest: A token id is out of range.
            Unavailable: No planner answered.
        """
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token id by itself. Raises InvalidRequest, Unavailable."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Cancel all requests with this id on every node. Returns False if there is none.

        Raises:
            Unavailable: An ingress did not answer, and no other one has the request.
        """
        ...

    async def timeline(self, id: str) -> RequestTimeline | None:
        """Find the timeline of a finished request by its answer's id or X-Request-ID, on any node; None without one."""
        ...

    async def status(self) -> dict[str, Any]:
        """Return the body of `GET /v1/status`."""
        ...

    async def metrics(self, shows_names: bool) -> bytes:
        """Return the body of `GET /metrics`. shows_names: whether it may contain the names of API keys."""
        ...

    async def cache_status(self) -> dict[str, Any]:
        """Return the body of `GET /v1/cache`, see http/cache.py."""
        ...

    async def clear_cache(self) -> dict[str, Any]:
        """Clear the prefix caches of all engines except pinned entries. Returns the body of `DELETE /v1/cache`."""
        ...

    async def drain_node(self, node_id: str, deadline_s: float = HAND_OVER_S) -> TakenOver:
        """Let the engine of a node take no new request, and move its open ones and its snapshots to the others.

        Args:
            node_id: The node.
            deadline_s: Longest time for the snapshots, after the requests have moved; 0: they stay.

        Returns:
            What the others have got of its snapshots.

        Raises:
            NodeNotFound: No node with this id has an engine.
            Unavailable: It is the only one, no other engine takes requests, or engines of it do not answer; those that
                do are drained.
        """
        ...

    async def undo_drain(self, node_id: str) -> None:
        """Let the engine of a drained node take requests again.

        Raises:
            NodeNotFound: No node with this id has an engine.
            Unavailable: It does not answer.
        """
        ...

    async def not_ready(self) -> str | None:
        """Return the reason why no request can be served now; None if requests can be served."""
        ...

    async def not_started(self) -> str | None:
        """Return the reason as `not_ready`, or why requests with images cannot be served yet after the start."""
        ...
