"""An engine and a scorer that behave as Ray's handles do, and what a SparsePlanner makes of prompts between them."""

import asyncio
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.planners.sparse_planner import PromptFacts, SparsePlanner
from deployments.requests import ChatRequest, SpecPrefillReport
from engine.core.spec_prefill.plan import Scored, ScoreRequest, make_plan
from engine.protocol import Boundary, CachedPrefix, EngineRequest, SamplingParams, SparsePlan
from engine.spec_prefill_config import SpecPrefillConfig
from tests.deployments.fake_handle import FakeCall, FakeHandle, running

NUM_TOKENS, NUM_SYSTEM = 1000, 100
THRESHOLD = 500
CONTROL, PICTURE = 1, 6
IMPORTANT = range(512, 544)
"""The chunk that the draft looks at."""

CONFIG = SpecPrefillConfig(enabled=True, threshold_tokens=THRESHOLD, max_tokens_scored=2000, deadline_s=5)


def prompt(num_tokens: int = NUM_TOKENS, **options: Any) -> EngineRequest:
    """Ordinary tokens, a system part, and a last turn that ends 20 tokens before the end."""
    boundaries = (Boundary("system", NUM_SYSTEM), Boundary("turn", num_tokens - 20))
    given: dict[str, Any] = {"boundaries": tuple(b for b in boundaries if b.num_tokens > 0), **options}
    token_ids = np.arange(num_tokens, dtype=np.int32) + 50
    return EngineRequest("r", token_ids, SamplingParams(8), (2,), **given)


def asking(**options: Any) -> ChatRequest:
    return ChatRequest("r", ({"role": "user", "content": "?"},), **options)


ASKED = asking(spec_prefill=True)


def plan_of(request: ScoreRequest) -> SparsePlan:
    importance = np.zeros(len(request.token_ids), np.float32)
    importance[IMPORTANT.start : IMPORTANT.stop] = 1
    return make_plan(request, importance)


def scored(request: ScoreRequest, plan: SparsePlan | None = None, num_scored: int = 7) -> Scored:
    return Scored(plan_of(request) if plan is None else plan, num_scored, 0.5)


Script = list[Any]


@dataclass
class Graph:
    """An engine and scorers; of each list every call takes the next, and the last one stays. engine: CachedPrefix,
    seconds or an error. scorer: the same, or what makes a Scored of a ScoreRequest. nodes: that have a scorer.
    """

    engine: Script = field(default_factory=lambda: [CachedPrefix(0)])
    scorer: Script = field(default_factory=lambda: [scored])
    nodes: tuple[str, ...] = ("node-7",)
    log: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    asked: list[EngineRequest] = field(default_factory=list)
    to_score: list[ScoreRequest] = field(default_factory=list)

    def planner(self, config: SpecPrefillConfig = CONFIG, image_token_id: int | None = PICTURE) -> SparsePlanner:
        facts = PromptFacts(frozenset({CONTROL}), image_token_id)
        engine: Any = Engine(self)
        scorer: Any = Scorer(self)
        return SparsePlanner(config, facts, engine, scorer)


@dataclass
class Engine(FakeHandle):
    graph: Graph

    def call(self, request: Any) -> FakeCall:
        assert self.chosen["method_name"] == "cached_prefix"
        self.graph.log.append("ask")
        self.graph.asked.append(request)
        return FakeCall(_next(self.graph.engine), lambda: self.graph.cancelled.append("ask"))


@dataclass
class Scorer(FakeHandle):
    graph: Graph

    def running(self) -> dict[str, Any]:
        return running(*self.graph.nodes)

    def call(self, request: ScoreRequest) -> FakeCall:
        sent = pickle.loads(pickle.dumps(request))  # noqa: S301
        assert self.chosen["method_name"] == "score"
        self.graph.log.append(f"score {self.chosen['session_id']}")
        self.graph.to_score.append(sent)
        outcome = _next(self.graph.scorer)
        outcome = outcome(sent) if callable(outcome) else outcome
        return FakeCall(outcome, lambda: self.graph.cancelled.append("score"))


def _next(script: Script) -> Any:
    return script.pop(0) if len(script) > 1 else script[0]


Planned = tuple[EngineRequest, SpecPrefillReport | None]


def plan(planner: SparsePlanner, request: ChatRequest = ASKED, engine_request: EngineRequest | None = None) -> Planned:
    async def go() -> Planned:
        async with asyncio.timeout(60):
            return await planner.plan(request, prompt() if engine_request is None else engine_request)

    return asyncio.run(go())


def dense_because(
    graph: Graph, request: ChatRequest = ASKED, engine_request: EngineRequest | None = None, **config: Any
) -> tuple[str, str]:
    """Category and reason, of a prompt that is dense and says why."""
    planner = graph.planner(CONFIG.model_copy(update=config))
    planned, report = plan(planner, request, engine_request)
    status = planner.status()
    assert report is not None and report.dense_because is not None and status is not None
    assert planned.sparse is None and status["sparse"] == 0
    ((category, count),) = status["dense"].items()
    assert count == 1
    return category, report.dense_because


def is_left_alone(graph: Graph, request: ChatRequest, engine_request: EngineRequest | None = None) -> bool:
    """Dense, without a word about it in usage or counters."""
    planner = graph.planner()
    given = prompt() if engine_request is None else engine_request
    counters = {"sparse": 0, "replanned": 0, "dense": {}}
    return plan(planner, request, given) == (given, None) and planner.status() == counters
