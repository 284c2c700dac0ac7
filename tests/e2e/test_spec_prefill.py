"""Sparse prompts as a client sees them in the usage, and what becomes of them when the scorer is lost."""

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.world.draws import Draws
from tests.e2e.server import ServeRun

pytestmark = pytest.mark.server
planned_alike = pytest.mark.night("tests/deployments/planners/test_sparse_planner.py decides the same without a server")

VERY_LONG = 10_000
"""Tokens; the draft reads them for seconds."""
PEOPLE = {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}


@pytest.fixture(scope="module")
def client(small_server: ServeRun) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def http(small_server: ServeRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small_server.base_url, timeout=120) as http:
        yield http


def needle(num_tokens: int = 2000, seed: int = 0) -> tuple[list[dict[str, Any]], str]:
    """A fact in a long text with a question about it, all in one message of the user, and the right answer."""
    draws = Draws(seed)
    while len(messages := retrieval(draws, num_tokens, single=True).messages) > 2:
        pass  # the text is in the system part, which is always dense
    return messages[:1], messages[1]["content"]


def ask(
    client: openai.OpenAI, messages: list[dict[str, Any]], extra: dict[str, Any] | None = None, **options: Any
) -> Any:
    """By a tenant of its own: nothing of it is cached."""
    body = {"cache_salt": uuid.uuid4().hex, **(extra or {})}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "extra_body": body, **options}
    return client.chat.completions.create(model="demo", messages=messages, **asked)  # pyright: ignore


SPARSE = {"specprefill": True}
"""Else a plan is made only where it saves time, which depends on the machine."""


def report(answer: Any) -> dict[str, Any] | None:
    return (answer.usage.prompt_tokens_details.model_extra or {}).get("specprefill")


def is_sparse(answer: Any) -> bool:
    found = report(answer)
    return found is not None and found["dense_because"] is None and found["skipped_tokens"] > 0


def scorer(http: httpx.Client) -> dict[str, Any]:
    """Return the status of the only scorer; raises while there is none."""
    (replica,) = http.get("/v1/status").json()["spec_prefill"]
    return replica


def num_unavailable(http: httpx.Client) -> int:
    """Prompts that the planner left dense because there was no scorer."""
    return http.get("/v1/status").json()["text"][0]["spec_prefill"]["dense"].get("unavailable", 0)


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ValueError, httpx.HTTPError):  # no scorer, or two
            if condition():
                return
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def wait_until_scored(http: httpx.Client, answer: Callable[[], object]) -> None:
    """Wait until the scorer reads a prompt. answer: Returns the answer to its request, for the error."""

    def explain() -> str:
        status = http.get("/v1/status").json()
        return f"scorers: {status['spec_prefill']}, planners: {status['text']}, answer: {answer()}"

    wait_until(lambda: scorer(http)["scorer"]["num_running"] == 1, 30, explain)


def test_long_prompt_is_prefilled_sparsely_and_answered(client: openai.OpenAI, http: httpx.Client):
    messages, right = needle()
    before = http.get("/v1/status").json()["engines"][0]["engine"]
    answer = ask(client, messages, SPARSE)
    found = report(answer)
    assert found is not None and found["dense_because"] is None
    num_tokens = answer.usage.prompt_tokens
    assert 0.5 * num_tokens < found["skipped_tokens"] <= 0.7 * num_tokens
    assert found["scored_tokens"] == num_tokens and found["scoring_ms"] > 0
    assert answer.choices[0].message.content == right
    status = http.get("/v1/status").json()
    engine = status["engines"][0]["engine"]
    assert engine["num_sparse"] == before["num_sparse"] + 1
    assert engine["num_skipped_tokens"] == before["num_skipped_tokens"] + found["skipped_tokens"]
    assert status["text"][0]["spec_prefill"]["sparse"] >= 1
    (replica,) = status["spec_prefill"]
    assert replica["scorer"]["state"] == "ready" and replica["scorer"]["num_scored"] >= 1
    assert replica["pid"] not in {status["engines"][0]["pid"], status["text"][0]["pid"]}


def test_long_prompt_is_prefilled_sparsely_by_default_unless_scoring_saves_no_time(client: openai.OpenAI):
    for seed in (10, 11):
        messages, right = needle(seed=seed)
        answer = ask(client, messages)
        found = report(answer)
        assert found is not None and answer.choices[0].message.content == right
        assert is_sparse(answer) or found["dense_because"].startswith("no gain: scoring ")


def test_usage_of_a_stream_reports_the_sparse_prefill_of_the_whole_answer(client: openai.OpenAI):
    messages, right = needle(seed=1)
    whole = ask(client, messages, SPARSE)
    *chunks, last = ask(client, messages, SPARSE, stream=True, stream_options={"include_usage": True})
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == right
    found, streamed = report(whole), report(last)
    assert found is not None and streamed is not None
    assert streamed["skipped_tokens"] == found["skipped_tokens"] and is_sparse(last)


@planned_alike
def test_keep_of_a_request_decides_how_many_tokens_are_skipped(client: openai.OpenAI):
    messages, _ = needle(seed=2)
    skipped = []
    for keep in (0.1, 0.5):
        found = report(ask(client, messages, {"specprefill": True, "specprefill_keep_pct": keep}))
        assert found is not None
        skipped.append(found["skipped_tokens"])
    assert skipped[0] > 1.4 * skipped[1] > 0


@planned_alike
def test_request_with_specprefill_false_is_prefilled_densely(client: openai.OpenAI):
    messages, right = needle(seed=3)
    answer = ask(client, messages, {"specprefill": False})
    assert report(answer) is None
    assert answer.choices[0].message.content == right


@planned_alike
def test_prompt_below_the_threshold_has_a_report_only_on_request(client: openai.OpenAI):
    messages, _ = needle(300)
    assert report(ask(client, messages)) is None
    found = report(ask(client, messages, {"specprefill_keep_pct": 0.5}))
    assert found is not None and found["dense_because"].startswith("below threshold_tokens: ")
    assert is_sparse(ask(client, messages, {"specprefill": True}))
    found = report(ask(client, [{"role": "user", "content": "What is 12 + 30?"}], {"specprefill": True}))
    assert found is not None and found["dense_because"].startswith("too short") and found["skipped_tokens"] == 0


def test_second_sparse_prompt_uses_the_cached_dense_system_part(client: openai.OpenAI):
    rules = "You are Kira, a baker from Oakdale. " + " ".join(["The blue square is to the left."] * 20)
    salt = {"cache_salt": uuid.uuid4().hex, **SPARSE}
    cached = []
    for seed in (4, 5):
        messages, _ = needle(seed=seed)
        answer = ask(client, [{"role": "system", "content": rules}, *messages], salt)
        assert is_sparse(answer)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0 < 100 < cached[1]


@pytest.mark.parametrize(
    "extra",
    [
        {"specprefill_keep_pct": 0.05},
        {"specprefill_keep_pct": 1.5},
        {"specprefill": False, "specprefill_keep_pct": 0.5},
    ],
)
@pytest.mark.night("hostile rows go through the whole graph in tests/golden")
def test_invalid_keep_is_refused_by_name(client: openai.OpenAI, extra: dict[str, Any]):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, needle()[0], extra)
    assert refused.value.param == "specprefill_keep_pct"


@planned_alike
def test_prompt_with_a_grammar_is_dense_with_the_reason_unless_sparse_on_request(client: openai.OpenAI):
    messages, _ = needle(seed=6)
    grammar: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "code", "schema": PEOPLE}}
    }
    found = report(ask(client, messages, **grammar))
    assert found is not None and (found["dense_because"], found["skipped_tokens"]) == ("grammar", 0)
    assert is_sparse(ask(client, messages, {"specprefill": True}, **grammar))


def test_client_that_disconnects_stops_the_scoring(small_server: ServeRun, http: httpx.Client):
    messages, _ = needle(VERY_LONG, seed=7)
    before = scorer(http)["scorer"]
    body = {"model": "demo", "messages": messages, "max_tokens": 40, **SPARSE}

    async def leave_while_it_is_scored() -> None:
        async with httpx.AsyncClient(base_url=small_server.base_url, timeout=120) as leaving:
            asked = asyncio.ensure_future(leaving.post("/v1/chat/completions", json=body))
            await asyncio.to_thread(wait_until_scored, http, lambda: asked.done() and asked.result().text)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave_while_it_is_scored())
    wait_until(lambda: scorer(http)["scorer"]["num_running"] == 0, 10)
    after = scorer(http)["scorer"]
    assert after["num_cancelled"] == before["num_cancelled"] + 1
    assert after["num_scored"] == before["num_scored"]


@pytest.mark.night("it shows what Serve does; the dense answers are in tests/deployments/test_faults.py")
def test_prompts_are_answered_densely_while_a_killed_scorer_is_replaced(client: openai.OpenAI, http: httpx.Client):
    messages, _ = needle(VERY_LONG, seed=8)
    pid, before = scorer(http)["pid"], num_unavailable(http)
    with ThreadPoolExecutor(1) as pool:
        in_progress = pool.submit(ask, client, messages, SPARSE)
        wait_until_scored(http, lambda: in_progress.done() and in_progress.result())
        os.kill(pid, signal.SIGKILL)
        short, right = needle(seed=9)
        meanwhile = ask(client, short, SPARSE)
        answers = [meanwhile, in_progress.result()]
    assert meanwhile.choices[0].message.content == right
    for answer in answers:
        found = report(answer)
        assert found is not None and found["dense_because"].startswith("unavailable: "), found
        assert found["skipped_tokens"] == 0 and answer.choices[0].finish_reason in ("stop", "length")
    assert num_unavailable(http) == before + 2
    wait_until(lambda: scorer(http)["pid"] != pid and scorer(http)["scorer"]["state"] == "ready", 60)
    wait_until(lambda: is_sparse(ask(client, short, SPARSE)), 10)
