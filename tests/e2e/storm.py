"""The load of a storm: clients of every kind, three in ten of which leave or cancel, and the books of what they saw."""

import asyncio
import contextlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult

from tests.e2e.storm_requests import NO_REPLY, Ask, Reply, check_answer, make_ask, read_reply
from tests.support.sse import completions_url, post
from tests.support.sse import run as run_loop

MAX_CLIENTS = 48
LEAVING = 0.4
"""Share of the clients that leave, among those that are not refused. Some of them have their whole answer before they
leave: three in ten are given up."""
ANSWER_TIMEOUT_S = 120.0
READ_BYTES = 2**16
_COMPLETION_ID = re.compile(rb'"id": ?"(chatcmpl-[0-9a-f]+)"')

Way = Literal["half sent", "at once", "waiting", "in the stream", "cancel", "cancel in the stream"]


@dataclass(frozen=True)
class Leave:
    """How a client gives up. after: seconds for `waiting` and `cancel`, events for those in the stream."""

    way: Way
    after: float = 0.0


@dataclass(frozen=True)
class Visit:
    number: int
    ask: Ask
    leave: Leave | None

    @property
    def request_id(self) -> str:
        return f"storm-{self.number}"

    def __str__(self) -> str:
        how = "stream" if self.ask.streams else "whole"
        return f"{self.request_id} ({self.ask.kind}, {how}, n {self.ask.num_choices}, {self.leave})"


class BadCancel(Exception):
    pass


@dataclass
class Talk:
    """The reply to a request. left: the client hung up before the end. cancelled: what the cancel API said, if it was
    asked."""

    raw: bytearray = field(default_factory=bytearray)
    left: bool = False
    cancelled: bool | None = None
    error: str | None = None


def plan_storm(num_requests: int, num_waves: int, seed: int) -> list[list[Visit]]:
    """Equal arguments give equal storms. Nobody of the last wave leaves at a moment in which the engine may or may not
    have begun: its rows can be counted exactly."""
    rng, ends = random.Random(seed), [num_requests * (i + 1) // num_waves for i in range(num_waves)]
    asks = [make_ask(rng) for _ in range(num_requests)]
    visits = [Visit(i, ask, _leave(rng, ask, only_in_the_stream=i >= ends[-2])) for i, ask in enumerate(asks)]
    return [visits[begin:end] for begin, end in itertools.pairwise((0, *ends))]


def _leave(rng: random.Random, ask: Ask, only_in_the_stream: bool) -> Leave | None:
    if ask.refused or (only_in_the_stream and not ask.streams):
        return None
    if rng.random() > LEAVING * (1 + only_in_the_stream):  # every other one streams
        return None
    elsewhere, in_the_stream, events = not only_in_the_stream, int(ask.streams), rng.randint(1, 12)
    ways = {
        Leave("half sent"): 1 * elsewhere,
        Leave("at once"): 1 * elsewhere,
        Leave("waiting", rng.uniform(0, 1)): 2 * elsewhere,
        Leave("cancel", rng.uniform(0, 1.5)): 2 * elsewhere,
        Leave("in the stream", events): 3 * in_the_stream,
        Leave("cancel in the stream", events): 3 * in_the_stream,
    }
    return rng.choices(list(ways), list(ways.values()))[0]


def run_storm(base: str, visits: Sequence[Visit]) -> list[Talk]:
    """All of them, as many at a time as there are clients."""
    return run_loop(_storm(completions_url(base), visits))


async def _storm(url: SplitResult, visits: Sequence[Visit]) -> list[Talk]:
    talks: list[Talk] = [Talk() for _ in visits]
    todo = iter(zip(visits, talks, strict=True))

    async def client(todo: Iterator[tuple[Visit, Talk]]) -> None:
        for visit, talk in todo:
            await hold(url, visit.ask, talk, visit.request_id, visit.leave)

    await asyncio.gather(*(client(todo) for _ in range(MAX_CLIENTS)))
    return talks


async def hold(url: SplitResult, ask: Ask, talk: Talk, request_id: str, leave: Leave | None = None) -> None:
    """One request over one connection. Never raises for what the server does."""
    wire = post(url, ask.body, {"X-Request-Id": request_id})
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                half = leave is not None and leave.way == "half sent"
                writer.write(wire[: len(wire) // 2] if half else wire)
                await writer.drain()
                await _listen(url, reader, talk, request_id, leave)
            finally:
                writer.transport.abort()
    except TimeoutError:
        talk.error = f"no end within {ANSWER_TIMEOUT_S:g} s"
    except (OSError, BadCancel) as error:
        talk.error = f"{type(error).__name__}: {error}"


async def _listen(
    url: SplitResult, reader: asyncio.StreamReader, talk: Talk, request_id: str, leave: Leave | None
) -> None:
    """Reads to the end, or until the client has had enough."""
    match leave:
        case None:
            await _read(reader, talk)
        case Leave("half sent" | "at once"):
            talk.left = True
        case Leave("waiting", seconds):
            with contextlib.suppress(TimeoutError):
                talk.raw += await asyncio.wait_for(reader.read(READ_BYTES), seconds)
            talk.left = True
        case Leave("in the stream", num_events):
            talk.left = not await _read(reader, talk, num_events)
        case Leave("cancel", seconds):
            cancelling = asyncio.create_task(_cancel_later(url, request_id, seconds))
            try:
                await _read(reader, talk)
            finally:
                talk.cancelled = await cancelling
        case Leave("cancel in the stream", num_events):
            if not await _read(reader, talk, num_events):
                found = _COMPLETION_ID.search(talk.raw)
                talk.cancelled = await cancel(url, found[1].decode() if found else request_id)
                await _read(reader, talk)


async def _read(reader: asyncio.StreamReader, talk: Talk, num_events: float = float("inf")) -> bool:
    """Up to so many events, or to the end: then True."""
    while talk.raw.count(b"data: ") <= num_events:
        data = await reader.read(READ_BYTES)
        if not data:
            return True
        talk.raw += data
    return False


async def _cancel_later(url: SplitResult, request_id: str, seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return await cancel(url, request_id)


async def cancel(url: SplitResult, request_id: str) -> bool:
    """Whether there was something to cancel. Raises BadCancel."""
    talk = Talk()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(post(url._replace(path=f"{url.path}/{request_id}/cancel"), {}))
        await _read(reader, talk)
    finally:
        writer.transport.abort()
    if talk.raw.startswith(b"HTTP/1.1 200") and b'"chat.completion.cancel"' in talk.raw:
        return True
    if talk.raw.startswith(b"HTTP/1.1 404") and b'"request_not_found"' in talk.raw:
        return False
    raise BadCancel(f"the cancel API answered {bytes(talk.raw)!r}")


@dataclass
class Books:
    """The clients' counts, by the names of the engine's counters.

    least_rows, most_rows: that the engine must, and may, have begun: of somebody who left in time nobody knows.
    finished_rows: that nobody ended but the model. problems: in words; there should be none. texts: of requests that
    may come again, by their keys; shared with other books.
    """

    texts: dict[str, tuple[str, ...]] = field(repr=False)
    least_rows: int = 0
    most_rows: int = 0
    finished_rows: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sparse: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_repeated: int = 0

    def add(self, visit: Visit, talk: Talk) -> None:
        try:
            outcome = self._outcome(visit, talk)
        except NO_REPLY as error:
            outcome = "problem"
            self.problems.append(f"{visit}: {type(error).__name__}: {error}; {bytes(talk.raw[-600:])!r}")
        self.outcomes[outcome] += 1
        if outcome == "whole":
            self.kinds[visit.ask.kind] += 1

    def _outcome(self, visit: Visit, talk: Talk) -> str:
        assert talk.error is None, talk.error
        if talk.left:
            assert not talk.raw or (talk.raw.startswith(b"HTTP/1.1 200") and b'"error":' not in talk.raw)
            self._count_rows(visit.ask, talk)
            self.num_output_tokens += talk.raw.count(b'"content": "') - talk.raw.count(b'"content": ""')
            return f"left {visit.leave.way}" if visit.leave else "left"
        reply = read_reply(bytes(talk.raw))
        assert reply.headers["x-request-id"] == visit.request_id
        if visit.ask.refused is not None:
            return _refused(visit.ask, reply)
        if talk.cancelled:
            self._count_rows(visit.ask, talk)
            return _cancelled(reply)
        self._whole(visit.ask, reply)
        return "whole" if talk.cancelled is None else "whole, cancelled too late"

    def _count_rows(self, ask: Ask, talk: Talk) -> None:
        """An answer begins to stream when its rows have given their first tokens."""
        self.most_rows += ask.num_choices
        if talk.raw.startswith(b"HTTP/1.1 200"):
            self.least_rows += ask.num_choices

    def _whole(self, ask: Ask, reply: Reply) -> None:
        assert reply.status == 200 and reply.said is not None, (reply.status, reply.error)
        said = reply.said
        check_answer(ask, said)
        self.least_rows += ask.num_choices
        self.most_rows += ask.num_choices
        self.finished_rows += 0 if "stop" in ask.body else ask.num_choices  # else we end it in the middle
        self.num_output_tokens += said.usage["completion_tokens"]
        self.num_prompt_tokens += said.usage["prompt_tokens"]
        details = said.usage["prompt_tokens_details"]
        self.num_cached_tokens += details["cached_tokens"]
        self.num_sparse += details.get("specprefill", {}).get("skipped_tokens", 0) > 0
        if ask.repeats:
            first = self.texts.setdefault(ask.key, said.texts)
            self.num_repeated += first is not said.texts
            assert said.texts == first, f"it was {first} before"


def _refused(ask: Ask, reply: Reply) -> str:
    assert reply.error is not None and (reply.status, reply.error["param"]) == ask.refused, (reply.status, reply.error)
    return "refused"


def _cancelled(reply: Reply) -> str:
    """As the API has said that it was."""
    assert reply.error is not None and reply.error["code"] == "request_cancelled", (reply.status, reply.said)
    assert reply.status == 499 or reply.headers["content-type"].startswith("text/event-stream"), reply.status
    return "cancelled"


def engine_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of the only engine."""
    (replica,) = status["engines"]
    return replica["engine"]


QUESTIONS = {"engines": 1, "text": 1, "mllm": 1, "spec_prefill": 1, "ingress": 2}
"""Calls that run in a replica because its status is asked for: to an ingress also the HTTP request itself."""


def held_calls(status: dict[str, Any]) -> dict[str, int]:
    """By replica, what Serve counts as held there: as long as it does, the replica cannot drain."""
    held = {}
    for name, num_questions in QUESTIONS.items():
        for i, replica in enumerate(status[name] or ()):
            held[f"ongoing requests, {name} {i}"] = max(0, replica["num_ongoing_requests"] - num_questions)
    return held


def unrest(status: dict[str, Any]) -> list[str]:
    """Return the resources still in use when no client is left; there should be none."""
    engine = engine_of(status)
    held = {
        "running": status["num_running"],
        "waiting": status["num_waiting"],
        "reserved_bytes": engine["admission"]["reserved_bytes"],
        "decode_cache_bytes": engine["memory"]["decode_cache_bytes"],
        "prefill_cache_bytes": engine["memory"]["prefill_cache_bytes"],
        **{f"in flight, ingress {i}": each["num_in_flight"] for i, each in enumerate(status["ingress"])},
        **{f"scoring, {i}": each["scorer"]["num_running"] for i, each in enumerate(status["spec_prefill"] or ())},
        **held_calls(status),
    }
    return [f"{name}: {value}" for name, value in held.items() if value]
