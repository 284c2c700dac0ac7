"""TextMTP: the planner of requests that are text only."""

from typing import Any

from ray import serve

from deployments.chat import ChatRequest, Plan, Route
from deployments.planning import PromptPlanner
from deployments.replica import log_refusals_in_one_line, node_id, replica_info
from engine.config import EngineConfig


@serve.deployment()
class TextMTP:
    """Renders the chat template and tokenizes, on the node whose engine will answer."""

    def __init__(self, config: EngineConfig):
        log_refusals_in_one_line()
        self._planner = PromptPlanner(config)

    async def plan(self, request: ChatRequest) -> Plan:
        """Raises InvalidRequest, ContextLengthExceeded."""
        return Plan(await self._planner.engine_request(request, request.messages), Route.TEXT, node_id())

    async def status(self) -> dict[str, Any]:
        return replica_info()
