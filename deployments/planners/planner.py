"""Planner: what both planners do with a request: images, prompt, and a plan for a sparse prefill."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.planners.prompt_planner import PromptPlanner
from deployments.planners.sparse_planner import PromptFacts, SparsePlanner
from deployments.process import node_id, replica_info
from deployments.ray_internals import listen_on_node_address
from deployments.requests import ChatRequest, Plan
from deployments.serve_log import join_serve_log
from engine.errors import OrchardError
from engine.protocol import EngineRequest, ImagePatches


class Planner:
    """Renders the chat template and tokenizes, on the node whose engine will answer."""

    def __init__(self, args: AppArgs, engine: DeploymentHandle | None = None, scorer: DeploymentHandle | None = None):
        listen_on_node_address()
        join_serve_log()
        self._planner = PromptPlanner(args.engine, finds_boundaries=args.spec_prefill.enabled)
        self._sparse = SparsePlanner(args.spec_prefill, PromptFacts.of(self._planner.tokenizer), engine, scorer)

    async def plan(self, request: ChatRequest, engine_id: str = "") -> Plan:
        """Prepare a request for an engine of this node.

        Args:
            request: The request.
            engine_id: The engine; '' without Ray.

        Raises:
            InvalidRequest: Names the content part or field.
            ContextLengthExceeded: The prompt does not fit the context.
            Unavailable: No image worker can be started.
        """
        began_s = time.monotonic()
        async with self._images(request) as images:
            loaded_s = time.monotonic()
            dense = await self._planner.engine_request(request, request.messages, images)
            prompted_s = time.monotonic()
            planned, report = await self._sparse.plan(request, dense, engine_id)
            seconds = {"prompt": prompted_s - loaded_s, "sparse": time.monotonic() - prompted_s}
            if images:
                seconds = {"images": loaded_s - began_s, **seconds}
            return Plan(planned, node_id(), report, seconds)

    async def plan_group(self, texts: Sequence[ChatRequest]) -> list[EngineRequest | OrchardError]:
        """Prepare texts for their embeddings or scores, see PromptPlanner.pooled_requests."""
        return await self._planner.pooled_requests(texts)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Count the prompt's tokens, images included. Raises what `plan` raises."""
        async with self._images(request) as images:
            return await self._planner.count_tokens(request, request.messages, images)

    async def token_ids(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids. Raises what `plan` raises."""
        async with self._images(request) as images:
            return (await self._planner.token_ids(request, request.messages, images)).tolist()

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        """Decode token ids. Raises InvalidRequest naming the field."""
        return await self._planner.text_of(token_ids, field)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return await self._planner.token_texts(token_ids)

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "spec_prefill": self._sparse.status()}

    @asynccontextmanager
    async def _images(self, request: ChatRequest) -> AsyncIterator[tuple[ImagePatches, ...]]:
        """Hold the images of a request, of which a planner of texts has none."""
        yield ()
