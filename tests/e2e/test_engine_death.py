"""A small engine under load whose process is killed, and whose queue is full: what its clients are told, and that
nothing is lost for those who come afterwards. -s prints the times; ORCHARD_KILLS=3 kills the replacements as well."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.pictures import about, image_part, shape
from tests.e2e.server import MAX_QUEUE, MAX_RUNNING, START_TIMEOUT_S, ServeRun
from tests.e2e.storm import Talk, engine_of, hold, unrest
from tests.e2e.storm_requests import NO_REPLY, Ask, Reply, check_answer, needle_text, read_reply
from tests.support.sse import completions_url
from tests.support.timelines import assert_sums

pytestmark = pytest.mark.server

NUM_KILLS = int(os.environ.get("ORCHARD_KILLS", "1"))
PHASE_TIMEOUT_S = 60.0
LONG_TOKENS, SCORED_TOKENS = 9000, 10_000
"""Prompts that are taken in, or scored, for seconds."""


@pytest.fixture(scope="module")
def http(small_server: ServeRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small_server.base_url, timeout=120) as http:
        yield http


def ask(messages: Any, max_tokens: int, **fields: Any) -> Ask:
    """Greedy, so that an answer that is begun again is the same."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": max_tokens, **fields}
    return Ask({**body, "stream_options": {"include_usage": True}} if body.get("stream") else body)


def endless(animal: str, num_tokens: int = 600, **fields: Any) -> Ask:
    return ask(f"Tell me a story about a {animal}.", num_tokens, min_tokens=num_tokens, **fields)


def picture(color: str, **fields: Any) -> Ask:
    return ask(about("What is in the image?", image_part(shape(color, "circle"))), 32, **fields)


RUNNING = {
    "streaming 1": endless("fox", stream=True),
    "streaming 2": endless("cat", stream=True),
    "decoding, not streamed": endless("dog"),
}
SCORED = "being scored"
QUEUED = {
    "queued 1": ask("What is 12 + 30?", 32),
    "queued 2": ask("What is the capital of France?", 32, stream=True),
    "queued, a story": ask("Tell me a story about an owl.", 48, stream=True),
    "queued, three choices": ask("List three fruits.", 32, n=3),
    "queued, a schema": ask("Hello!", 100, response_format={"type": "json_object"}),
    "queued, a picture": picture("red"),
    "queued, a streamed picture": picture("blue", stream=True),
}


def prefilling(salt: str) -> dict[str, Ask]:
    """By somebody whose prompts nobody has taken in before; so is the next."""
    return {"prefilling": ask(needle_text(LONG_TOKENS, 1), 16, specprefill=False, cache_salt=salt)}


def scoring(salt: str) -> dict[str, Ask]:
    return {SCORED: ask(needle_text(SCORED_TOKENS, 2), 16, specprefill=True, stream=True, cache_salt=salt)}


@dataclass
class Load:
    """Requests in flight, each in a task of its own."""

    base_url: str
    asks: dict[str, Ask] = field(default_factory=dict)
    talks: dict[str, Talk] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, asks: dict[str, Ask]) -> None:
        for name, ask in asks.items():
            self.asks[name], self.talks[name] = ask, Talk()
            self._tasks.append(asyncio.create_task(self._hold(name)))

    async def _hold(self, name: str) -> None:
        url = completions_url(f"{self.base_url}/v1")
        self.began_s[name] = time.monotonic()
        await hold(url, self.asks[name], self.talks[name], request_id(name))
        self.ended_s[name] = time.monotonic()

    async def replies(self) -> dict[str, Reply]:
        """All of them; a reply that is broken off or does not come raises."""
        await asyncio.gather(*self._tasks)
        assert not {name: talk.error for name, talk in self.talks.items() if talk.error}
        return {name: self._reply(name) for name in self.asks}

    def _reply(self, name: str) -> Reply:
        raw = bytes(self.talks[name].raw)
        try:
            return read_reply(raw)
        except NO_REPLY as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}; {raw[-600:]!r}") from error

    def has_content(self, name: str) -> bool:
        raw = self.talks[name].raw
        return raw.count(b'"content": "') > raw.count(b'"content": ""')


def request_id(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


async def until(http: httpx.Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status of which it holds."""
    deadline = time.monotonic() + PHASE_TIMEOUT_S
    while True:
        status = (await asyncio.to_thread(http.get, "/v1/status")).raise_for_status().json()
        if len(status["engines"]) == 1 and condition(status):
            return status
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)


def waits(num_requests: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status["num_waiting"] >= num_requests


def is_prefilling(status: dict[str, Any]) -> bool:
    return engine_of(status)["memory"]["prefill_cache_bytes"] > 0


def is_scoring(status: dict[str, Any]) -> bool:
    return any(each["scorer"]["num_running"] for each in status["spec_prefill"])


async def fill_every_phase(http: httpx.Client, load: Load, salt: str) -> dict[str, Any]:
    """The status in which they all are where their names say."""
    load.send(RUNNING)
    await until(http, lambda status: status["num_running"] == 3 and all(map(load.has_content, list(RUNNING)[:2])))
    load.send(prefilling(salt))
    await until(http, is_prefilling)
    load.send(QUEUED)
    await until(http, waits(len(QUEUED)))
    load.send(scoring(salt))
    status = await until(http, is_scoring)
    assert is_prefilling(status) and waits(len(QUEUED))(status) and status["num_running"] == MAX_RUNNING, status
    return status


def check_retryable(reply: Reply) -> None:
    """Check that the error tells the client that and when the request may be sent again."""
    assert reply.error is not None
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.error["code"] == "unavailable" and reply.error["retry_after_s"] > 0, reply.error
        return
    assert reply.status == 503 and reply.error["code"] in ("unavailable", "not_ready"), (reply.status, reply.error)
    assert int(reply.headers["retry-after"]) >= 1, reply.headers


def outcome_of(reply: Reply) -> str:
    return "whole" if reply.error is None else f"{reply.status} {reply.error['code']}"


def is_served(http: httpx.Client) -> bool:
    """Whether a request succeeds now; if not, it must be told to come again."""
    response = http.post("/v1/chat/completions", json=ask("What is 12 + 30?", 8).body)
    if response.status_code == 200:
        return True
    check_retryable(Reply(response.status_code, response.headers, None, response.json()["error"]))
    return False


async def seconds_until_served(http: httpx.Client) -> float:
    began = time.monotonic()
    while not await asyncio.to_thread(is_served, http):
        assert time.monotonic() < began + START_TIMEOUT_S
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def kill_under_load(server: ServeRun, http: httpx.Client, salt: str) -> None:
    load = Load(server.base_url)
    status = await fill_every_phase(http, load, salt)
    pid = status["engines"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    served_s = await seconds_until_served(http)
    replies = await load.replies()
    outcomes = {name: outcome_of(reply) for name, reply in replies.items()}
    print(f"\nserved again after {served_s:.1f} s; {dict(Counter(outcomes.values()))}")  # noqa: T201
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome} after {load.ended_s[name] - killed_s:.1f} s")  # noqa: T201
    for name, reply in replies.items():
        if reply.said is None:
            check_retryable(reply)
        else:
            check_answer(load.asks[name], reply.said)
    after = await until(http, lambda status: not unrest(status))
    assert after["engines"][0]["pid"] != pid
    assert engine_of(after)["num_failed"] == 0, after
    check_timelines(http, load, replies)
    await check_resumed_answers(load, replies)


def check_timelines(http: httpx.Client, load: Load, replies: dict[str, Reply]) -> None:
    """Each tells all the seconds that its client waited, also those before the engine's death was noticed."""
    for name, reply in replies.items():
        told = http.get(f"/v1/requests/{request_id(name)}").raise_for_status().json()
        assert_sums(told, load.ended_s[name] - load.began_s[name])
        assert told["outcome"] == ("failed" if reply.said is None else "answered"), (name, told)


async def check_resumed_answers(load: Load, replies: dict[str, Reply]) -> None:
    """Answers continued on another engine equal those that the requests get without a kill. Sparse plans may differ."""
    said = {name: reply.said for name, reply in replies.items() if reply.said is not None and name != SCORED}
    again = Load(load.base_url)
    again.send({name: load.asks[name] for name in said})
    for name, reply in (await again.replies()).items():
        assert reply.said is not None and reply.said.texts == said[name].texts, name


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_engine_killed_under_load_is_replaced_and_every_request_is_answered(
    small_server: ServeRun, http: httpx.Client, number: int
):
    asyncio.run(kill_under_load(small_server, http, f"kill {number}"))


async def overfill(server: ServeRun, http: httpx.Client) -> None:
    accepted, refused = Load(server.base_url), Load(server.base_url)
    before = await until(http, lambda status: not unrest(status))
    animals = ("fox", "cat", "dog", "owl")
    accepted.send({f"running, {animal}": endless(animal, 400, stream=True) for animal in animals})
    await until(http, lambda status: status["num_running"] == MAX_RUNNING)
    accepted.send({f"waiting {i}": ask("What is 12 + 30?", 32, stream=i % 2 == 0) for i in range(MAX_QUEUE)})
    await until(http, waits(MAX_QUEUE))
    texts = [ask("Hello!", 32, **fields) for fields in ({}, {"stream": True}, {"n": 3})]
    more = [*texts, picture("red"), picture("red", stream=True)]
    refused.send({f"too many {i}": ask for i, ask in enumerate(2 * more)})
    for name, reply in (await refused.replies()).items():
        assert reply.status == 429 and reply.error is not None, (name, reply)
        assert reply.error["code"] == "overloaded" and 1 <= int(reply.headers["retry-after"]) <= 60, reply
    status = await until(http, lambda status: True)
    assert (status["num_running"], status["num_waiting"]) == (MAX_RUNNING, MAX_QUEUE), "no refusal waited for a place"
    for name, reply in (await accepted.replies()).items():
        assert reply.said is not None, (name, reply)
        check_answer(accepted.asks[name], reply.said)
    after = await until(http, lambda status: not unrest(status))
    finished = engine_of(after)["num_finished"] - engine_of(before)["num_finished"]
    assert finished == MAX_RUNNING + MAX_QUEUE
    num_refused = [status["ingress"][0]["num_refused"] for status in (before, after)]
    assert num_refused[1] - num_refused[0] == len(refused.asks)


def test_full_queue_refuses_excess_requests_and_answers_all_accepted_requests(
    small_server: ServeRun, http: httpx.Client
):
    """It has as many places as ever, although requests were lost with engines before."""
    asyncio.run(overfill(small_server, http))
