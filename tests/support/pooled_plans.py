"""Plans of texts whose embeddings or scores are wanted."""

import asyncio

from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest
from engine.errors import OrchardError
from engine.protocol import EngineRequest


def planned(planner: PromptPlanner, *texts: ChatRequest) -> list[EngineRequest]:
    """The requests for the embeddings or scores of texts; raises the error of the first invalid one."""
    found = asyncio.run(planner.pooled_requests(texts))
    for one in found:
        if isinstance(one, OrchardError):
            raise one
    return [one for one in found if isinstance(one, EngineRequest)]
