"""Placer against engines that answer, refuse, are slow or silent."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.dispatch import placer
from deployments.dispatch.placer import FACTS, Place, Placer
from deployments.placement.conversation_keys import sketch_conversation
from deployments.requests import ChatRequest, Route
from engine.placement import CachedSnapshot, PrefixHolder, Question, Quote
from tests.deployments.fake_handle import FakeCall, FakeHandle, running


@dataclass
class Engine:
    """An engine that answers each question with `quote` after `delay_s`, or raises it."""

    quote: Quote | Exception = field(default_factory=Quote)
    delay_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    booked: list[Question] = field(default_factory=list)
    asked: list[Question] = field(default_factory=list)
    said: dict[str, float] = field(default_factory=dict)
    """Request id -> the wait of its last quote: a booking is refused if it has grown by more than 2 s."""
    grows_s: float = 0.0
    """By how much its wait grows with each booking."""


class Engines(FakeHandle):
    """A handle of engines, by node, as the router of this process knows them."""

    def __init__(self, engines: dict[str, Engine]):
        self.engines = engines
        self.whole = self
        self.num_calls = 0
        self.replicas = running(*engines)
        for name, engine in engines.items():
            self.replicas[name].replica_metadata = {FACTS: engine.facts}

    def running(self) -> dict[str, Any]:
        return self.replicas

    def call(self, question: Question) -> FakeCall:
        is_booking = self.chosen["method_name"] == "book"
        node_id = self.chosen["session_id"].removeprefix("node:").removesuffix("@0")
        engine = self.engines[node_id]
        self.whole.num_calls += 1

        class Call(FakeCall):
            async def get_async(self) -> Any:
                await asyncio.sleep(engine.delay_s)
                if isinstance(engine.quote, Exception):
                    raise engine.quote
                if not is_booking:
                    engine.asked.append(question)
                    engine.said[question.request_id] = engine.quote.wait_s
                    return engine.quote
                if engine.quote.wait_s > engine.said[question.request_id] + 2.0:
                    engine.said[question.request_id] = engine.quote.wait_s
                    return engine.quote
                engine.booked.append(question)
                engine.quote = replace(engine.quote, wait_s=engine.quote.wait_s + engine.grows_s)
                return None

        return Call()


def request(name: str = "r", words: str = "What is 12 + 30?", **fields: Any) -> ChatRequest:
    messages = ({"role": "user", "content": words},)
    return ChatRequest(name, messages, sketch=sketch_conversation(messages), **fields)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def place(engines: Engines, asked: ChatRequest | None = None, **options: Any) -> Place | None:
    return run(Placer(engines).place(asked or request(), Route.TEXT, **options))  # type: ignore[arg-type]


def test_the_node_with_the_fewest_seconds_is_booked():
    engines = Engines({"a": Engine(Quote(prefill_s=30.0)), "b": Engine(Quote(prefill_s=2.0))})
    found = place(engines)
    assert found is not None and (found.node_id, found.num_asked) == ("b", 2)
    assert [len(engine.booked) for engine in engines.engines.values()] == [0, 1]
    assert engines.num_calls == 3


@pytest.mark.parametrize("nodes", [{}, {"a": Engine()}])
def test_a_single_node_is_asked_nothing(nodes: dict[str, Engine]):
    engines = Engines(nodes)
    assert place(engines) is None and engines.num_calls == 0


def test_nothing_is_asked_for_a_request_without_a_sketch():
    engines = Engines({"a": Engine(), "b": Engine()})
    assert place(engines, ChatRequest("r", ())) is None and engines.num_calls == 0


def test_a_node_that_the_request_has_tried_is_left_out():
    engines = Engines({"a": Engine(), "b": Engine(Quote(wait_s=3.0)), "c": Engine(Quote(wait_s=9.0))})
    found = place(engines, without=["a"])
    assert found is not None and found.node_id == "b" and not engines.engines["a"].asked


def test_a_node_that_refuses_is_left_out_and_none_is_chosen_if_all_do():
    engines = Engines({"a": Engine(Quote(refusal="memory")), "b": Engine(Quote(prefill_s=100.0))})
    found = place(engines)
    assert found is not None and found.node_id == "b"
    engines.engines["b"].quote = Quote(refusal="draining")
    assert place(engines) is None


def test_a_silent_node_delays_one_request_and_the_next_ones_not_at_all(monkeypatch: pytest.MonkeyPatch):
    for limit in ("QUOTE_TIMEOUT_S", "BEHIND_FIRST_S", "LIKELY_TIMEOUT_S"):
        monkeypatch.setattr(placer, limit, 2.0)
    engines = Engines({"a": Engine(delay_s=60.0), "b": Engine(Quote(prefill_s=3.0))})
    num_requests = 5

    async def go() -> list[float]:
        chooses, seconds = Placer(engines), []  # type: ignore[arg-type]
        for i in range(num_requests):
            began = time.monotonic()
            found = await chooses.place(request(f"r{i}"), Route.TEXT)
            seconds.append(time.monotonic() - began)
            assert found is not None and found.node_id == "b"
        return seconds

    seconds = run(go())
    assert seconds[0] >= 2.0 > sum(seconds[1:])
    assert engines.num_calls == 1 + 2 * num_requests, "one question to the silent node, a quote and a booking of each"


def test_a_node_that_answers_late_gets_requests_again(monkeypatch: pytest.MonkeyPatch):
    for limit in ("QUOTE_TIMEOUT_S", "BEHIND_FIRST_S", "LIKELY_TIMEOUT_S"):
        monkeypatch.setattr(placer, limit, 0.1)
    engines = Engines({"a": Engine(delay_s=0.5), "b": Engine(Quote(prefill_s=3.0))})

    async def go() -> list[str]:
        chooses, nodes = Placer(engines), []  # type: ignore[arg-type]
        for delay_s in (0.5, 0.0, 0.0):
            engines.engines["a"].delay_s = delay_s
            found = await chooses.place(request(words=f"{len(nodes)}"), Route.TEXT)
            assert found is not None
            nodes.append(found.node_id)
            await asyncio.sleep(1.0)
        return nodes

    assert run(go()) == ["b", "a", "a"]


def test_a_dead_node_is_left_out_and_a_request_goes_somewhere_if_all_are_silent():
    engines = Engines({"a": Engine(ActorDiedError()), "b": Engine(Quote(prefill_s=3.0))})
    found = place(engines)
    assert found is not None and found.node_id == "b"
    engines.engines["b"].delay_s = 5.0
    found = place(engines)
    assert found is not None and found.quote is None, "the router and the heartbeats decide what becomes of it"


@pytest.mark.parametrize(("num_ingresses", "least"), [(1, 5), (2, 4), (6, 1)])
def test_simultaneous_requests_see_each_others_bookings(
    num_ingresses: int, least: int, monkeypatch: pytest.MonkeyPatch
):
    """An ingress counts its own at once; several ingresses that ask at the same moment compare the nodes again."""
    for name in ("QUOTE_TIMEOUT_S", "BEHIND_FIRST_S"):  # on a busy machine this event loop itself is late
        monkeypatch.setattr(placer, name, 5.0)
    engines = Engines({name: Engine(Quote(prefill_s=10.0, next_s=10.0), delay_s=0.01, grows_s=10.0) for name in "ab"})

    async def go() -> list[str]:
        placers = [Placer(engines) for _ in range(num_ingresses)]  # type: ignore[arg-type]
        asked = [request(f"r{i}", "the same words") for i in range(12)]
        found = await asyncio.gather(
            *[placers[i % num_ingresses].place(one, Route.TEXT) for i, one in enumerate(asked)]
        )
        return [one.node_id for one in found if one is not None]

    nodes = run(go())
    assert min(map(nodes.count, "ab")) >= least


def test_later_turns_of_a_conversation_go_to_its_node():
    engines = Engines({f"n{i}": Engine() for i in range(20)})

    async def go() -> list[str]:
        chooses, nodes = Placer(engines), []  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
        for i in range(6):
            asked = ChatRequest(f"r{i}", tuple(messages), sketch=sketch_conversation(messages))
            found = await chooses.place(asked, Route.TEXT)
            assert found is not None and found.num_asked <= 4
            nodes.append(found.node_id)
            messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": f"go on {i}"}]
        return nodes

    assert len(set(run(go()))) == 1


def test_nodes_that_come_and_go_are_followed():
    engines = Engines({name: Engine(Quote(prefill_s=5.0)) for name in "ab"})

    async def go() -> list[str]:
        chooses, nodes = Placer(engines), []  # type: ignore[arg-type]
        for i in range(3):
            if i == 1:
                engines.engines["c"] = Engine(Quote(prefill_s=1.0))
                engines.replicas = engines.replicas | running("c")
            if i == 2:
                del engines.replicas["c"]  # as Ray does when an actor dies
            found = await chooses.place(request(f"r{i}", f"{i}"), Route.TEXT)
            assert found is not None
            nodes.append(found.node_id)
        return nodes

    first, second, third = run(go())
    assert first in "ab" and third in "ab" and second in "abc"
    assert all(question.request_id == "r1" for question in engines.engines["c"].asked)


def test_the_size_of_tokens_is_learned_from_plans():
    engines = Engines({"a": Engine(), "b": Engine()})

    async def go() -> None:
        chooses = Placer(engines)  # type: ignore[arg-type]
        asked = request(words="x" * 8000)
        await chooses.place(asked, Route.TEXT)
        for _ in range(200):
            chooses.planned(asked, 8000)
        await chooses.place(asked, Route.TEXT)

    run(go())
    before, after = (question.num_tokens for question in engines.engines["a"].asked)
    assert 1900 < before < 2200 and 7500 < after < 8200


def test_a_node_whose_context_is_too_short_is_not_asked():
    engines = Engines(
        {"small": Engine(facts={"max_context_tokens": 100}), **{name: Engine(Quote(prefill_s=9.0)) for name in "abc"}}
    )
    found = place(engines, request(words="x" * 8000))
    assert found is not None and found.node_id != "small" and not engines.engines["small"].asked


def test_the_request_learns_which_node_has_more_of_its_prefix():
    held = CachedSnapshot("digest", 9000, 10**6)
    busy = Quote(cached_tokens=9000, snapshot=held, wait_s=500.0)
    facts = {name: {"snapshots": f"{name}:7"} for name in "ab"}
    engines = Engines({"a": Engine(busy, facts=facts["a"]), "b": Engine(Quote(prefill_s=5.0), facts=facts["b"])})
    found = place(engines)
    assert found is not None and found.node_id == "b"
    assert found.holder == PrefixHolder("a:7", "digest", 9000)


def test_a_node_that_was_left_is_asked_for_what_it_holds_and_not_chosen():
    held = Quote(snapshot=CachedSnapshot("digest", 9000, 10**6), refusal="draining")
    facts = {name: {"snapshots": f"{name}:7"} for name in "abc"}
    engines = Engines(
        {"a": Engine(held, facts=facts["a"]), **{name: Engine(Quote(), facts=facts[name]) for name in "bc"}}
    )
    found = place(engines, without=["a"], holders=["a"])
    assert found is not None and found.node_id in "bc"
    assert found.holder == PrefixHolder("a:7", "digest", 9000)


def test_the_only_node_left_learns_what_the_other_one_holds():
    held = Quote(snapshot=CachedSnapshot("digest", 9000, 10**6), refusal="draining")
    engines = Engines(
        {name: Engine(quote, facts={"snapshots": f"{name}:7"}) for name, quote in (("a", held), ("b", Quote()))}
    )
    assert place(engines, without=["a"]) is None
    found = place(engines, without=["a"], holders=["a"])
    assert found is not None and (found.node_id, found.holder) == ("b", PrefixHolder("a:7", "digest", 9000))


def test_a_node_that_can_fetch_is_chosen_where_computing_there_would_take_too_long():
    held = Quote(cached_tokens=10**6, snapshot=CachedSnapshot("digest", 10**6, 10**9), wait_s=200.0, is_resident=True)
    facts = {name: {"snapshots": f"{name}:7"} for name in "ab"}
    fetching = Quote(prefill_s=300.0, fetch_bytes_per_s=1e9)
    for quote, expected in ((fetching, "b"), (replace(fetching, fetch_bytes_per_s=1e5), "a")):
        engines = Engines({"a": Engine(held, facts=facts["a"]), "b": Engine(quote, facts=facts["b"])})
        found = place(engines)
        assert found is not None and found.node_id == expected
