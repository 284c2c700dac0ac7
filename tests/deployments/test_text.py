import asyncio
from typing import Any

from deployments.chat import ChatRequest, Route
from deployments.text import TextMTP
from engine.config import EngineConfig


def test_a_text_request_is_planned():
    planner: Any = TextMTP.func_or_class
    plan = asyncio.run(planner(EngineConfig()).plan(ChatRequest("r", ({"role": "user", "content": "Hello!"},), seed=1)))
    assert plan.route == Route.TEXT
    assert plan.request.images == () and len(plan.request.token_ids) > 5
    assert plan.planner_node == ""
