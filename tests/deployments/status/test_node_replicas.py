"""The figures of a node are those of its own replicas, as far as they answer."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from deployments.metrics.node_figures import NodeFigures, SparsePlans
from deployments.status import node_replicas
from deployments.status.node_replicas import NodeReplicas
from engine.core.spec_prefill.plan import ScorerStatus
from engine.errors import EngineFailed
from engine.figures import EngineFigures
from engine.status import EngineStatus
from tests.deployments.fake_handle import FakeCall, FakeHandle

Figures = tuple[NodeFigures, list[NodeFigures]]

HERE, ELSEWHERE = "here", "elsewhere"
FIGURES = EngineFigures(status=EngineStatus(state="ready", model="x", load_progress=1.0, num_steps=7))
OTHER = EngineFigures(status=EngineStatus(state="ready", model="x", load_progress=1.0, num_steps=9))
SCORER = ScorerStatus(state="ready", draft_model="d", num_scored=3)


class Replicas(FakeHandle):
    """Replicas whose answers, seconds or errors are given by node."""

    def __init__(self, method: str, answers: Mapping[str, Any]):
        self.num_asked = 0
        self._method = method
        self._answers = answers

    async def results(self, method: str, *arguments: Any) -> list[Any]:
        assert method == self._method and not arguments
        self.num_asked += 1
        return [
            FakeCall({"node_id": node, "engine_id": node, **said} if isinstance(said, dict) else said)
            for node, said in self._answers.items()
        ]


@pytest.fixture(autouse=True)
def on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_replicas, "node_id", lambda: HERE)


def planner(**spec_prefill: Any) -> Any:
    return Replicas("status", {HERE: {"spec_prefill": {"sparse": 1, "replanned": 0, "dense": {}, **spec_prefill}}})


def test_replicas_of_other_nodes_are_left_out_and_not_waited_for():
    engine = Replicas("figures", {ELSEWHERE: {"figures": OTHER}, HERE: {"figures": FIGURES}, "silent": 30.0})
    scorer = Replicas("status", {ELSEWHERE: {"scorer": {}}, HERE: {"scorer": asdict(SCORER)}})
    planners = {"text": planner(dense={"cached": 2}), "media": planner(sparse=4)}

    async def go() -> Figures:
        async with asyncio.timeout(1):
            return await NodeReplicas("demo", engine, planners, scorer).figures()  # pyright: ignore[reportArgumentType]

    plans = {"text": SparsePlans(num_sparse=1, dense={"cached": 2}), "media": SparsePlans(num_sparse=4)}
    assert asyncio.run(go()) == (NodeFigures(model="demo", engine=FIGURES, sparse_plans=plans, scorer=SCORER), [])


@pytest.mark.parametrize("answers", [{}, {HERE: EngineFailed("dead")}, {ELSEWHERE: {"figures": OTHER}}])
def test_an_engine_that_does_not_answer_is_left_out(answers: dict[str, Any]):
    replicas = NodeReplicas("demo", Replicas("figures", answers), {}, None)  # pyright: ignore[reportArgumentType]
    assert asyncio.run(replicas.figures()) == (NodeFigures(model="demo"), [])


def test_a_silent_engine_delays_a_scrape_only_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_replicas, "TIMEOUT_S", 0.05)
    replicas = NodeReplicas("demo", Replicas("figures", {HERE: 30.0}), {}, None)  # pyright: ignore[reportArgumentType]

    async def go() -> Figures:
        async with asyncio.timeout(60):
            return await replicas.figures()

    assert asyncio.run(go()) == (NodeFigures(model="demo"), [])


def test_scrapes_share_calls_and_planners_are_asked_only_with_a_scorer():
    engine, text = Replicas("figures", {HERE: {"figures": FIGURES}}), planner()

    async def go() -> None:
        replicas: Any = NodeReplicas("demo", engine, {"text": text}, None)  # pyright: ignore[reportArgumentType]
        await asyncio.gather(*(replicas.figures() for _ in range(3)))
        await replicas.figures()

    asyncio.run(go())
    assert (engine.num_asked, text.num_asked) == (1, 0)
