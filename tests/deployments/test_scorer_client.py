"""Whatever keeps engine or scorer from answering makes a prompt dense, and what nobody waits for is cancelled."""

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from deployments import scorer_client
from deployments.sparse_planner import PromptFacts, SparsePlanner
from engine.protocol import (
    CachedPrefix,
    EngineFailed,
    InvalidRequest,
    OrchardError,
    Overloaded,
)
from tests.deployments.fake_handle import FakeCall, FakeSelection, task_error
from tests.deployments.scoring_graph import (
    ASKED,
    CONFIG,
    Engine,
    Graph,
    Scorer,
    dense_because,
    plan,
    prompt,
)

SECRET = "/secret/path of node 10.0.0.1"
LATE = "scoring 9000 tokens would take about 40 s with 3 other prompts in progress; the limit is 30 s (deadline_s)"
GONE = DeploymentUnavailableError(DeploymentID(name="SpecPrefillScorer", app_name="orchard"))


@pytest.mark.parametrize(
    ("broken", "category", "reason"),
    [
        ({"scorer": [task_error(Overloaded(LATE, 1.0))]}, "busy", f"busy: {LATE}"),
        ({"reserve": [60.0]}, "unavailable", "unavailable: no scorer accepted the prompt within 0.1 s"),
        ({"reserve": [GONE]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [ActorDiedError()]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [RequestCancelledError("r")]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [asyncio.CancelledError()]}, "unavailable", "unavailable: the scorer was lost"),
        ({"reserve": [asyncio.CancelledError()]}, "unavailable", "unavailable: the scorer was lost"),
        (
            {"scorer": [task_error(EngineFailed(SECRET))]},
            "unavailable",
            "unavailable: the scorer has failed or is not ready, see /v1/status",
        ),
        ({"scorer": [task_error(OrchardError(SECRET))]}, "failed", "failed"),
        ({"scorer": [task_error(ZeroDivisionError(SECRET))]}, "failed", "failed"),
        ({"scorer": [lambda request: None]}, "failed", "failed"),
        ({"scorer": [60.0]}, "deadline", "deadline: no plan within 0.3 s"),
        ({"engine": [60.0]}, "deadline", "deadline: no plan within 0.3 s"),
        ({"engine": [ActorDiedError()]}, "unavailable", "unavailable: the engine was lost"),
        ({"engine": [asyncio.CancelledError()]}, "unavailable", "unavailable: the engine was lost"),
        ({"engine": [CachedPrefix(0), asyncio.CancelledError()]}, "unavailable", "unavailable: the engine was lost"),
        (
            {"engine": [task_error(EngineFailed(SECRET))]},
            "unavailable",
            "unavailable: the engine has failed or is not ready, see /v1/status",
        ),
        ({"engine": [ZeroDivisionError(SECRET)]}, "failed", "failed"),
        ({"engine": [CachedPrefix(0), 60.0]}, "deadline", "deadline: no plan within 0.3 s"),
    ],
)
def test_every_scoring_failure_makes_the_prompt_dense_with_a_reason_and_a_warning(
    broken: dict[str, Any],
    category: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(scorer_client, "RESERVE_TIMEOUT_S", 0.1)
    graph = Graph(**broken)
    assert dense_because(graph, deadline_s=0.3) == (category, reason)
    (record,) = [record for record in caplog.records if record.name == "ray.serve"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"request r: the prompt is prefilled densely: {reason}")
    assert graph.log.count("release") == sum(entry.startswith("reserve") for entry in graph.log)


def test_unexpected_scorer_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture):
    dense_because(Graph(scorer=[ZeroDivisionError(SECRET)]))
    assert "ZeroDivisionError" in caplog.text and SECRET in caplog.text


def test_known_scorer_error_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture):
    dense_because(Graph(scorer=[task_error(EngineFailed(SECRET))]))
    assert SECRET in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [TimeoutError(SECRET), task_error(TimeoutError(SECRET))])
@pytest.mark.parametrize("who", ["scorer", "reserve", "engine"])
def test_timeout_raised_by_a_callee_is_reported_as_a_failure(
    who: str, error: Exception, caplog: pytest.LogCaptureFixture
):
    broken: dict[str, Any] = {who: [error]}
    assert dense_because(Graph(**broken)) == ("failed", "failed")
    assert f"TimeoutError: {SECRET}" in caplog.text


def test_timeout_without_a_message_is_logged_by_its_type(caplog: pytest.LogCaptureFixture):
    assert dense_because(Graph(scorer=[TimeoutError()])) == ("failed", "failed")
    assert "TimeoutError" in caplog.text


def test_prompt_that_the_draft_cannot_score_is_dense_with_the_message_of_the_scorer(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "ray.serve")
    told = "the prompt has 1000 tokens; the draft's context is 512"
    assert dense_because(Graph(scorer=[task_error(InvalidRequest(told))])) == ("unfit_prompt", told)
    (record,) = [record for record in caplog.records if record.name == "ray.serve"]
    assert record.levelno == logging.INFO


def test_silent_engine_delays_a_prompt_only_until_the_engine_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scorer_client, "ENGINE_TIMEOUT_S", 0.1)
    graph = Graph(engine=[60.0])
    assert dense_because(graph) == ("unavailable", "unavailable: the engine did not answer within 0.1 s")
    assert graph.cancelled == ["ask"]


@pytest.mark.parametrize(("broken", "cancelled"), [({"scorer": [60.0]}, "score"), ({"engine": [60.0]}, "ask")])
def test_running_scorer_or_engine_call_is_cancelled_at_the_deadline(broken: dict[str, Any], cancelled: str):
    graph = Graph(**broken)
    dense_because(graph, deadline_s=0.1)
    assert graph.cancelled == [cancelled]


@pytest.mark.parametrize(
    ("broken", "log", "cancelled"),
    [
        ({"engine": [60.0]}, ["ask"], ["ask"]),
        ({"reserve": [0.9]}, ["ask"], []),
        ({"scorer": [60.0]}, ["ask", "reserve anywhere", "score", "release"], ["score"]),
        ({"engine": [CachedPrefix(0), 60.0]}, ["ask", "reserve anywhere", "score", "release", "ask"], ["ask"]),
    ],
)
def test_cancelled_request_stops_its_scoring(broken: dict[str, Any], log: list[str], cancelled: list[str]):
    graph = Graph(**broken)
    planner = graph.planner()

    async def go() -> None:
        task = asyncio.ensure_future(planner.plan(ASKED, prompt()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert (graph.log, graph.cancelled) == (log, cancelled)
    assert planner.status() == {"sparse": 0, "replanned": 0, "dense": {}}


def test_request_cancelled_before_its_dispatch_to_the_scorer_releases_its_slot():
    graph, released = Graph(), []

    class Unsent(FakeCall):
        """A dispatch that has not made its first step."""

        def __init__(self) -> None:
            super().__init__(60.0)
            self._replica_result_future = asyncio.get_running_loop().create_future()

        def cancel(self) -> None:
            self._replica_result_future.cancel()

    class Dispatching(Scorer):
        async def reserve(self) -> FakeSelection:
            return FakeSelection("node-7", on_release_unsent=lambda: released.append("slot"))

        def call(self, request: Any) -> FakeCall:
            return Unsent()

    async def go() -> None:
        engine: Any = Engine(graph)
        scorer: Any = Dispatching(graph)
        planner = SparsePlanner(CONFIG, PromptFacts(frozenset()), engine, scorer)
        task = asyncio.ensure_future(planner.plan(ASKED, prompt()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert released == ["slot"]


def test_scorer_is_called_in_the_local_testing_mode_of_serve():
    class Local(Scorer):
        async def reserve(self) -> FakeSelection:
            raise NotImplementedError

    graph = Graph()
    engine: Any = Engine(graph)
    scorer: Any = Local(graph)
    planned, _ = plan(SparsePlanner(CONFIG, PromptFacts(frozenset()), engine, scorer))
    assert planned.sparse is not None
