"""Everything that can go wrong on the way through the graph, as a client sees it over HTTP.

Real replicas and a tiny model; at each hand-over something fails, hangs, is cancelled, or its client leaves. Whatever
happens, there is an answer in time that says what to do, no slot, call or row is left, and the next request is served.
"""

import asyncio
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.args import AppArgs
from deployments.calls import scorer_client
from deployments.model_replica import ModelReplica
from deployments.planners.text import TextMTP
from engine.config import EngineConfig
from engine.errors import EngineFailed, Overloaded
from tests.deployments.fake_handle import task_error
from tests.deployments.faulty_graph import DEADLINE_S, Bench, Client, make
from tests.support.faults import Failing, Hanging, Stalling
from tests.support.faulty_engine import TINY
from tests.support.tiny import Tiny, build

ENDLESS: dict[str, Any] = {"max_tokens": 20_000, "min_tokens": 20_000}

HASTY_S = 0.5
"""As long as a hasty ingress waits for a plan."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "model", Tiny(**TINY))


@pytest.fixture(scope="module")
def bench(path: Path) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(path, monkeypatch).warm()
        yield bench
        bench.close()


GONE = ActorDiedError()
LIBRARY = ZeroDivisionError("a secret of the library")

POINTS = {
    "plan": ("text", "text.plan"),
    "plan of a picture": ("picture", "mllm.plan"),
    "dispatch": ("text", "dispatch engine"),
    "first chunk": ("text", "chunk"),
}
"""kind of request, seam; all of them before the first token"""

before_the_first_token = pytest.mark.parametrize(("kind", "seam"), POINTS.values(), ids=POINTS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def assert_try_again(client: Client, code: str, status: int) -> None:
    """The client is told so, and when: in the header, or in the event of a stream that has begun."""
    if client.status == 200:
        assert client.error["retry_after_s"] >= 1
    else:
        assert client.status == status and int(client.headers["retry-after"]) >= 1
    assert client.error["code"] == code, client.error


@streamed_or_not
@before_the_first_token
def test_a_replica_that_is_lost_before_the_first_token_is_replaced(bench: Bench, kind: str, seam: str, stream: bool):
    async def test() -> None:
        fault = bench.faults.arm(seam, Failing(GONE))
        client = await bench.answered(bench.ask(kind, stream=stream))
        assert fault.num_fired == 1 and client.status == 200
        assert (streamed_text(client) if stream else whole_text(client)) == bench.texts[kind]
        await bench.check()

    bench.run(test)


@before_the_first_token
def test_request_whose_retry_loses_its_replica_as_well_is_a_503(bench: Bench, kind: str, seam: str):
    async def test() -> None:
        fault = bench.faults.arm(seam, Failing(GONE), times=inf)
        client = await bench.answered(bench.ask(kind, stream=True))
        assert fault.num_fired == 2, "one more attempt, and not for ever"
        assert client.status == 503
        assert_try_again(client, "unavailable", 503)
        await bench.check()

    bench.run(test)


@before_the_first_token
def test_unexpected_error_is_a_500_without_internal_details(bench: Bench, kind: str, seam: str):
    async def test() -> None:
        fault = bench.faults.arm(seam, Failing(task_error(LIBRARY) if "plan" in seam else LIBRARY))
        client = await bench.answered(bench.ask(kind))
        assert fault.num_fired == 1 and client.status == 500
        assert client.error["type"] == "server_error" and "secret" not in client.text
        await bench.check()

    bench.run(test)


@pytest.mark.parametrize(
    ("kind", "seam", "told"),
    [
        ("text", "text.plan", "could not be prepared within 0.5 s"),
        ("picture", "mllm.plan", "could not be prepared within 0.5 s"),
    ],
)
def test_hanging_planning_is_a_503_after_the_timeout_of_the_ingress(bench: Bench, kind: str, seam: str, told: str):
    async def test() -> None:
        app = await bench.graph.ingress(plan_timeout_s=HASTY_S)
        bench.faults.arm(seam, stall := Stalling(), times=inf)
        client = await bench.answered(bench.ask(kind, app, stream=True))
        assert stall.began.is_set() and client.status == 503 and told in client.error["message"]
        assert_try_again(client, "unavailable", 503)
        await bench.check()

    bench.run(test)


@streamed_or_not
def test_requests_are_refused_while_planner_and_engine_have_different_models(
    bench: Bench, tmp_path: Path, stream: bool
):
    """As `serve deploy` has it: the ingress is the old one, and the replicas behind it become the new ones."""
    new = EngineConfig(model=str(build(tmp_path / "new", Tiny(**{**TINY, "layers": 4}))))
    old = dict(bench.graph.replicas)

    async def refused() -> None:
        client = await bench.answered(bench.ask("text", stream=stream))
        assert client.status == 503 and "The model is being replaced" in client.error["message"]
        assert_try_again(client, "unavailable", 503)

    async def test() -> None:
        bench.graph.replicas["text"] = await make(TextMTP, AppArgs(engine=new))
        await refused()
        bench.graph.replicas["engine"] = await make(ModelReplica, new)
        await refused()
        bench.graph.replicas["text"] = old["text"]
        await refused()
        end: Any = ModelReplica.func_or_class
        await end.__del__(bench.graph.replicas["engine"])
        bench.graph.replicas.update(old)
        await bench.check()

    try:
        bench.run(test)
    finally:
        bench.graph.replicas.update(old)


SCORING = ("engine.cached_prefix", "dispatch scorer", "scorer.score")
SCORING_FAILS = [
    *((seam, error) for seam in SCORING for error in (GONE, LIBRARY)),
    *(("scorer.score", error) for error in (Overloaded("full", 3.0), EngineFailed("broken"))),
]


@pytest.mark.parametrize(("seam", "error"), SCORING_FAILS, ids=[f"{s} {type(e).__name__}" for s, e in SCORING_FAILS])
def test_prompt_whose_scoring_fails_is_answered_densely(bench: Bench, seam: str, error: Exception):
    async def test() -> None:
        fault = bench.faults.arm(seam, Failing(error if error is GONE else task_error(error)))
        await assert_dense(bench, await bench.answered(bench.ask("long")))
        assert fault.num_fired == 1
        await bench.check()

    bench.run(test)


@pytest.mark.parametrize("seam", ["engine.cached_prefix", "scorer.score"])
def test_prompt_whose_scoring_hangs_is_answered_densely(bench: Bench, seam: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scorer_client, "ENGINE_TIMEOUT_S", HASTY_S)

    async def test() -> None:
        bench.faults.arm(seam, stall := Stalling())
        await assert_dense(bench, await bench.answered(bench.ask("long")))
        assert stall.began.is_set()
        await bench.check()

    bench.run(test)


async def assert_dense(bench: Bench, client: Client) -> None:
    assert client.status == 200, client.text
    report = client.body["usage"]["prompt_tokens_details"]["specprefill"]
    assert report["dense_because"] and report["skipped_tokens"] == 0 and "secret" not in client.text
    assert whole_text(client) == bench.dense


IN_ENGINE = ("dispatch engine", "chunk")
"""Where the engine has the request."""

HANDS = {**POINTS, "engine's cache": ("long", "engine.cached_prefix"), "score": ("long", "scorer.score")}


@pytest.mark.parametrize(("kind", "seam"), HANDS.values(), ids=HANDS)
def test_request_can_be_cancelled_at_every_stage_before_the_first_token(bench: Bench, kind: str, seam: str):
    async def test() -> None:
        async with bench.num_freed(seam in IN_ENGINE):
            client = bench.ask(kind, stream=True, **ENDLESS)
            await stalled(bench, client, seam)
            said = await bench.cancel()
            assert (said.status, said.body["cancelled"]) == (200, True)
            await bench.answered(client)
            assert (client.status, client.error["code"]) == (499, "request_cancelled")
            again = await bench.cancel()
            assert (again.status, again.error["code"]) == (404, "request_not_found")
            await bench.check()

    bench.run(test)


@pytest.mark.parametrize(("kind", "seam"), HANDS.values(), ids=HANDS)
def test_client_that_disconnects_before_the_first_token_frees_all_resources(bench: Bench, kind: str, seam: str):
    async def test() -> None:
        async with bench.num_freed(seam in IN_ENGINE):
            client = bench.ask(kind, stream=True, **ENDLESS)
            await stalled(bench, client, seam)
            client.leave()
            await bench.answered(client)
            await bench.check()

    bench.run(test)


async def stalled(bench: Bench, client: Client, seam: str, call: int = 1) -> None:
    """Returns when the request stands at the seam; it does so for ever."""
    if seam.startswith("dispatch"):  # that takes no time: what stands still is the engine
        seam = "chunk"
    bench.faults.arm(seam, stall := Stalling(), call=call)
    await asyncio.wait(
        {client.task, began := asyncio.ensure_future(stall.began.wait())},
        timeout=DEADLINE_S,
        return_when=asyncio.FIRST_COMPLETED,
    )
    began.cancel()
    assert stall.began.is_set(), client.sent


# --- in the middle of the answer -----------------------------------------------------------------------------------


@streamed_or_not
def test_replica_lost_midway_ends_the_answer_with_a_retryable_error(bench: Bench, stream: bool):
    async def test() -> None:
        bench.faults.arm("chunk", Failing(GONE), call=2)
        client = await bench.answered(bench.ask("text", stream=stream))
        assert client.status == (200 if stream else 503)
        assert_try_again(client, "unavailable", 503)
        assert_is_whole_http(client)
        await bench.check()

    bench.run(test)


@streamed_or_not
def test_unexpected_error_midway_ends_the_answer_without_internal_details(bench: Bench, stream: bool):
    async def test() -> None:
        bench.faults.arm("chunk", Failing(LIBRARY), call=2)
        client = await bench.answered(bench.ask("text", stream=stream))
        assert client.status == (200 if stream else 500)
        assert client.error["type"] == "server_error" and "secret" not in client.text
        assert_is_whole_http(client)
        await bench.check()

    bench.run(test)


@streamed_or_not
@pytest.mark.parametrize("n", [1, 3])
def test_running_answer_can_be_cancelled_with_all_its_choices(bench: Bench, n: int, stream: bool):
    async def test() -> None:
        async with bench.num_freed(n):
            client = bench.ask("text", stream=stream, n=n, **ENDLESS)
            await stalled(bench, client, "chunk", call=2)
            assert (await bench.cancel()).status == 200
            await bench.answered(client)
            assert client.status == (200 if stream else 499) and client.error["code"] == "request_cancelled"
            assert_is_whole_http(client)
            assert (await bench.cancel()).status == 404
            await bench.check()

    bench.run(test)


@streamed_or_not
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_disconnects_midway_frees_all_resources(bench: Bench, n: int, stream: bool):
    async def test() -> None:
        async with bench.num_freed(n):
            client = bench.ask("text", stream=stream, n=n, **ENDLESS)
            await stalled(bench, client, "chunk", call=2)
            client.leave()
            await bench.answered(client)
            await bench.check()

    bench.run(test)


@streamed_or_not
@pytest.mark.parametrize("seam", ["prefill", "decode"])
def test_failed_engine_step_ends_its_request_with_an_error_and_the_engine_recovers(
    bench: Bench, seam: str, stream: bool
):
    """The step that decodes fails when the client has the first token."""

    async def test() -> None:
        held = bench.faults.arm("decode", hang)
        bench.faults.arm("chunk", hang.release, call=2)
        fault = bench.faults.arm(seam, Failing(LIBRARY))
        client = await bench.answered(bench.ask("text", stream=stream))
        assert fault.num_fired == 1 and held.num_fired == (seam == "decode")
        begun = stream and seam == "decode"
        assert client.status == 200 if begun else client.status in (500, 503)
        assert client.error["code"] in ("engine_failed", "unavailable") and "secret" not in client.text
        assert_is_whole_http(client)
        await bench.check()

    with Hanging() as hang:
        bench.run(test)


@pytest.mark.parametrize(("seam", "stream"), [("prefill", False), ("decode", True)])
def test_hanging_engine_step_ends_running_and_new_requests_with_a_503(path: Path, seam: str, stream: bool):
    with pytest.MonkeyPatch.context() as monkeypatch, Hanging() as hang:
        bench = Bench(path, monkeypatch, step_timeout_s=1.0)

        async def test() -> None:
            bench.faults.arm(seam, hang)
            client = await bench.answered(bench.ask("text", stream=stream))
            assert client.status == (200 if stream else 503)
            assert_try_again(client, "unavailable", 503)
            assert_is_whole_http(client)
            late = await bench.answered(bench.ask("text"))
            assert_try_again(late, "unavailable", 503)
            hang.release()

        bench.run(test)
        bench.close()


def whole_text(client: Client) -> str:
    return client.body["choices"][0]["message"]["content"]


def streamed_text(client: Client) -> str:
    return "".join(choice["delta"].get("content") or "" for event in client.events for choice in event["choices"])


def assert_is_whole_http(client: Client) -> None:
    """No broken chunked read: the last message says that nothing follows, and a failed stream has no [DONE]."""
    assert client.sent[-1]["type"] == "http.response.body" and not client.sent[-1].get("more_body")
    assert "[DONE]" not in client.text
