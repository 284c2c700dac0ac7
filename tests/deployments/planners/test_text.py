import asyncio
from typing import Any

import pytest

from deployments.args import AppArgs
from deployments.planners.text import TextMTP
from deployments.requests import ChatRequest
from engine.errors import InvalidRequest


def test_a_text_request_is_planned():
    planner: Any = TextMTP.func_or_class
    request = ChatRequest("r", ({"role": "user", "content": "Hello!"},), seed=1)
    plan = asyncio.run(planner(AppArgs()).plan(request))
    assert plan.request.images == () and len(plan.request.token_ids) > 5
    assert (plan.planner_node, plan.spec_prefill) == ("", None)


def test_requested_sparse_prefill_without_a_scorer_is_refused():
    planner: Any = TextMTP.func_or_class
    request = ChatRequest("r", ({"role": "user", "content": "Hello!"},), spec_prefill=True)
    with pytest.raises(InvalidRequest, match=r"spec_prefill\.enabled: false"):
        asyncio.run(planner(AppArgs()).plan(request))
