"""TextMTP: the planner of requests that are text only."""

import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.planning import PromptPlanner
from deployments.process import node_id, replica_info
from deployments.protocol import ChatRequest, Plan
from deployments.ray_internals import by_reference, listen_on_node_address
from deployments.serve_log import join_serve_log
from deployments.sparse_planner import PromptFacts, SparsePlanner


@by_reference
@serve.deployment()
class TextMTP:
    """Renders the chat template and tokenizes, on the node whose engine will answer."""

    def __init__(self, args: AppArgs, engine: DeploymentHandle | None = None, scorer: DeploymentHandle | None = None):
        listen_on_node_address()
        join_serve_log()
        self._planner = PromptPlanner(args.engine, finds_boundaries=args.spec_prefill.enabled)
        self._sparse = SparsePlanner(args.spec_prefill, PromptFacts.of(self._planner.tokenizer), engine, scorer)

    async def plan(self, request: ChatRequest) -> Plan:
        """Prepare a text request or an embedding for the engine. Raises InvalidRequest, ContextLengthExceeded."""
        began_s = time.monotonic()
        if request.is_embedding:
            return Plan(await self._planner.embedding_request(request), node_id())
        dense = await self._planner.engine_request(request, request.messages)
        prompted_s = time.monotonic()
        planned, report = await self._sparse.plan(request, dense)
        seconds = {"prompt": prompted_s - began_s, "sparse": time.monotonic() - prompted_s}
        return Plan(planned, node_id(), report, seconds)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Count the prompt's tokens. Raises what `plan` raises."""
        return await self._planner.count_tokens(request, request.messages)

    async def token_ids(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids. Raises what `plan` raises."""
        return (await self._planner.token_ids(request, request.messages)).tolist()

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        """Decode token ids. Raises InvalidRequest naming the field."""
        return await self._planner.text_of(token_ids, field)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return await self._planner.token_texts(token_ids)

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "spec_prefill": self._sparse.status()}
