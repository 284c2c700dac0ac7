"""If engine or scorer does not answer, the prompt is dense; a call whose caller has gone is cancelled."""

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from deployments.calls import scorer_client
from deployments.calls.replica_choice import NoReplica
from engine.core.spec_prefill.plan import Scored, ScoreRequest
from engine.errors import EngineFailed, InvalidRequest, OrchardError, Overloaded
from engine.protocol import CachedPrefix
from tests.deployments.fake_handle import task_error
from tests.deployments.scoring_graph import (
    ASKED,
    Graph,
    dense_because,
    plan,
    prompt,
    scored,
)

SECRET = "/secret/path of node 10.0.0.1"
LATE = "scoring 9000 tokens would take about 40 s with 3 other prompts in progress; the limit is 30 s (deadline_s)"
GONE = DeploymentUnavailableError(DeploymentID(name="SpecPrefillScorer", app_name="orchard"))


@pytest.mark.parametrize(
    ("broken", "category", "reason"),
    [
        ({"scorer": [task_error(Overloaded(LATE, 1.0))]}, "busy", f"busy: {LATE}"),
        ({"nodes": ()}, "unavailable", "unavailable: no scorer is running"),
        ({"scorer": [GONE]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [NoReplica("gone")]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [ActorDiedError()]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [RequestCancelledError("r")]}, "unavailable", "unavailable: the scorer was lost"),
        ({"scorer": [asyncio.CancelledError()]}, "unavailable", "unavailable: the scorer was lost"),
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
    caplog: pytest.LogCaptureFixture,
):
    graph = Graph(**broken)
    assert dense_because(graph, deadline_s=0.3) == (category, reason)
    (record,) = [record for record in caplog.records if record.name == "ray.serve"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"request r: the prompt is prefilled densely: {reason}")


def test_unexpected_scorer_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture):
    dense_because(Graph(scorer=[ZeroDivisionError(SECRET)]))
    assert "ZeroDivisionError" in caplog.text and SECRET in caplog.text


def test_known_scorer_error_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture):
    dense_because(Graph(scorer=[task_error(EngineFailed(SECRET))]))
    assert SECRET in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [TimeoutError(SECRET), task_error(TimeoutError(SECRET))])
@pytest.mark.parametrize("who", ["scorer", "engine"])
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
        ({"scorer": [60.0]}, ["ask", "score node:node-7@0"], ["score"]),
        ({"engine": [CachedPrefix(0), 60.0]}, ["ask", "score node:node-7@0", "ask"], ["ask"]),
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


def test_scorer_of_the_same_node_is_preferred(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scorer_client, "node_id", lambda: "node-2")
    graph = Graph(nodes=("node-1", "node-2", "node-3"))
    plan(Graph.planner(graph))
    assert [entry for entry in graph.log if entry.startswith("score")] == ["score node:node-2@0"]


def test_a_second_plan_is_not_made_by_another_scorer_than_the_one_that_keeps_the_prompts_state():
    graph = Graph(engine=[CachedPrefix(0), CachedPrefix(300)])

    def leaving(request: ScoreRequest) -> Scored:
        graph.nodes = ("node-8",)
        return scored(request)

    graph.scorer = [leaving]
    assert dense_because(graph) == ("unavailable", "unavailable: no scorer is running on the prompt's node")


def test_scorer_is_called_in_the_local_testing_mode_of_serve():
    graph = Graph(nodes=("",))
    planned, _ = plan(graph.planner())
    assert planned.sparse is not None
    assert "score " in graph.log, "pinned to nothing"
