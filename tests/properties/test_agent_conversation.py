"""Typical work of agents on the demo model: long conversations with tools and nudges, other prompts and pictures."""

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.http.normalize import INLINE_MARK, SystemPolicy, normalize
from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest, Message, Thinking, Tool
from engine.config import EngineConfig
from engine.protocol import EngineRequest, ImagePatches
from engine.worker.model_runner import MLXRunner
from tests.support.conversations import Answer, Shelf, cache_config, common, plain_request, plain_tokens
from tests.support.driver import Driver

COMPARES_ALL = bool(os.environ.get("ORCHARD_SCHEDULES"))
NUM_TURNS = 20 if COMPARES_ALL else 15
SLACK = 24
"""Tokens that may be prefilled again: the least distance of boundaries, and how the template begins an answer."""
WORDS = ["read", "file", "line", "error", "test", "build", "branch", "value", "point", "table", "index", "path", "name"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
]
SYSTEM = "You are a careful agent. Read before you write, and test what you have written."
THINKING = {"tools": TOOLS, "enable_thinking": True}


@pytest.fixture(scope="module")
def planner() -> PromptPlanner:
    return PromptPlanner(EngineConfig())


def plan(
    planner: PromptPlanner,
    name: str,
    messages: Sequence[Message],
    policy: SystemPolicy = "inline",
    images: tuple[ImagePatches, ...] = (),
    tenant: str = "",
    tools: Sequence[dict[str, Any]] = (),
    enable_thinking: bool = False,
) -> EngineRequest:
    """As the text and media planners do it, but for the grammar of the calls: the answers here are a few tokens."""
    normal = normalize(messages, policy=policy)
    request = ChatRequest(
        name,
        normal,
        max_tokens=8,
        temperature=0.0,
        tenant=tenant,
        tools=tuple(Tool(**tool["function"]) for tool in tools),
        thinking=Thinking("on") if enable_thinking else None,
    )
    return replace(asyncio.run(planner.engine_request(request, normal, images)), grammar=None, thought=None)


def ask(driver: Driver, spec: EngineRequest) -> Answer:
    driver.run({0: [spec]})
    return Answer.of(driver, spec.request_id)


class Engines:
    """One with a cache and one without, side by side. requests: what they were asked, in order."""

    def __init__(self, runner: MLXRunner, **cache: Any):
        self.cached = Driver(runner, cache_config({"prefill_chunk_tokens": 2048}, **cache))
        self._cold = Driver(runner, cache_config({"prefill_chunk_tokens": 2048}, enabled=False))
        self.requests: list[EngineRequest] = []

    def ask(self, spec: EngineRequest, compares: bool = True) -> int:
        """How many tokens of the prompt were prefilled. The answer is that of the engine without cache."""
        before = self.cached.core.stats.num_prompt_tokens
        spec = replace(spec, request_id=f"{len(self.requests)} {spec.request_id}")
        got = ask(self.cached, spec)
        assert not compares or replace(got, num_cached=0) == ask(self._cold, spec), spec.request_id
        prefilled = self.cached.core.stats.num_prompt_tokens - before
        assert prefilled == len(spec.token_ids) - got.num_cached
        self.requests.append(spec)
        return prefilled

    def num_known(self, spec: EngineRequest) -> int:
        """Tokens that the prompt begins with like any before it."""
        return max((common(spec.token_ids, other.token_ids) for other in self.requests), default=0)


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def conversation(nudges: Sequence[str], seed: int = 1) -> Iterator[list[Message]]:
    """The history at each request of an agent. nudges: where late system messages come in, to stay there."""
    rng = random.Random(seed)
    history: list[Message] = [{"role": "system", "content": SYSTEM}]

    def nudge(place: str) -> None:
        if place in nudges and rng.random() < 0.6:
            history.append({"role": "system", "content": f"Reminder: {text(rng, 6)}."})

    num_steps = 0  # of tools, until the agent answers
    for turn in range(NUM_TURNS):
        if num_steps == 0:
            nudge("before the user's words")
            history.append({"role": "user", "content": f"Please {text(rng, rng.randint(3, 12))}."})
            nudge("behind the user's words")
            num_steps = rng.randint(1, 4)
        yield list(history)
        num_steps -= 1
        answer: Message = {"role": "assistant", "content": "", "reasoning_content": text(rng, rng.randint(2, 8))}
        if num_steps == 0:
            history.append({**answer, "content": text(rng, 5)})
            continue
        calls = [(f"call {turn} {i}", rng.choice(TOOLS)["function"]["name"]) for i in range(rng.randint(1, 2))]
        functions = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": {"path": text(rng, 1)}}}
            for id_, name in calls
        ]
        history.append({**answer, "tool_calls": functions})
        for id_, _ in calls:
            history.append({"role": "tool", "tool_call_id": id_, "content": text(rng, rng.randint(1, 14))})
        nudge("behind tool results")


PLACES = ("behind tool results", "before the user's words", "behind the user's words")


@pytest.mark.parametrize(
    "nudges",
    [
        pytest.param((), id="nowhere", marks=pytest.mark.night("nudges everywhere are harder")),
        pytest.param(PLACES[:1], id="behind tool results", marks=pytest.mark.night("nudges everywhere are harder")),
        pytest.param(PLACES, id="everywhere"),
    ],
)
def test_each_turn_of_an_agent_prefills_little_more_than_its_new_tokens(runner, planner, nudges):
    engines = Engines(runner)
    prefilled, lengths, excess = [], [], []
    history: list[Message] = []
    for turn, history in enumerate(conversation(nudges)):
        spec = plan(planner, f"turn {turn}", history, **THINKING)
        num_new = len(spec.token_ids) - engines.num_known(spec)
        prefilled.append(engines.ask(spec, compares=COMPARES_ALL or turn % 7 == 2))
        lengths.append(len(spec.token_ids))
        excess.append(prefilled[-1] - num_new)
        assert excess[-1] <= SLACK, f"turn {turn} of {lengths}: {prefilled}"
    assert not nudges or sum(message["role"] == "system" for message in history) > 3
    share = sum(prefilled) / sum(lengths)
    print(f"\n{nudges}: prefilled {sum(prefilled)} of {sum(lengths)} ({share:.0%}), excess {max(excess)}")  # noqa: T201
    assert share < 0.4
    assert engines.cached.core.prefixes.store.integrity_error() is None


def test_boundaries_of_any_conversation_serve_nearly_all_of_its_known_tokens(planner):
    """By the rules alone, so without a model: also of clients that send no thoughts back."""
    for seed in range(200 if COMPARES_ALL else 5):
        rng = random.Random(seed)
        nudges = [place for place in PLACES if rng.random() < 0.6]
        sends_thoughts = rng.random() < 0.7
        thinks = rng.random() < 0.7
        shelf, seen = Shelf(None, 16, ("system", "turn", "prompt")), []
        for turn, history in enumerate(conversation(nudges, seed)):
            if not sends_thoughts:
                history = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
            spec = plan(planner, "", history, tools=TOOLS, enable_thinking=thinks)
            num_known = max((common(spec.token_ids, other) for other in seen), default=0)
            assert shelf.serve(spec) >= num_known - SLACK, f"conversation {seed}, turn {turn}, nudges {nudges}"
            seen.append(spec.token_ids)


def test_a_message_hoisted_into_the_system_part_costs_a_full_prefill_and_the_miss_reports_it(runner, planner):
    engines = Engines(runner)
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(random.Random(1), 20)}]
    before = plan(planner, "before", talk, "hoist", **THINKING)
    engines.ask(before)
    talk += [
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": "Reminder: mind the tests."},
        {"role": "user", "content": "Then go on."},
    ]
    hoisted = plan(planner, "hoisted", talk, "hoist", **THINKING)
    num_common = engines.num_known(hoisted)
    assert engines.ask(hoisted) == len(hoisted.token_ids)
    told = engines.cached.core.prefixes.status().recent_misses[0]
    assert told.request_id == engines.requests[1].request_id
    assert (told.reason, told.num_cached, told.num_common) == ("text", 0, num_common)
    system = before.boundaries[0]
    assert system.kind == "system" and (told.boundary, told.boundary_tokens) == ("system", system.num_tokens)
    assert 0 < told.num_common < system.num_tokens
    assert told.prompt_token_ids == tuple(hoisted.token_ids[num_common:][: len(told.prompt_token_ids)]) != ()
    assert told.stored_token_ids == tuple(before.token_ids[num_common:][: len(told.stored_token_ids)]) != ()
    inline = plan(planner, "inline", talk, "inline", **THINKING)
    assert INLINE_MARK in normalize(talk, policy="inline")[-1]["content"]
    assert engines.ask(inline) == len(inline.token_ids) - before.boundaries[-1].num_tokens


def test_two_alternating_agents_both_keep_their_cached_prefixes(runner, planner):
    engines = Engines(runner)
    talks = [[{"role": "system", "content": f"{name} {SYSTEM}"}] for name in ("Alice.", "Bob.")]
    for turn in range(3):
        for talk in talks:
            talk.append({"role": "user", "content": text(random.Random(turn), 12)})
            spec = plan(planner, f"{turn}", talk, tools=TOOLS)
            num_new = len(spec.token_ids) - engines.num_known(spec)
            assert engines.ask(spec) <= num_new + SLACK
            talk.append({"role": "assistant", "content": text(random.Random(turn), 3)})
    status = engines.cached.core.prefixes.status()
    assert (status.num_hits, status.num_misses) == (4, 2) and status.num_evicted == 0


def test_changed_tools_are_named_by_the_miss_and_changed_thinking_still_hits_the_turn(runner, planner):
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(random.Random(1), 20)}]
    engines = Engines(runner)
    engines.ask(plan(planner, "two tools", talk, tools=TOOLS))
    engines.ask(plan(planner, "one tool", talk, tools=TOOLS[:1]))
    told = engines.cached.core.prefixes.status().recent_misses[0]
    assert told.reason == "tools" and told.num_cached == 0
    assert told.num_common < engines.requests[0].boundaries[0].num_tokens
    engines.ask(plan(planner, "two tools again", talk, tools=TOOLS))
    engines.ask(plan(planner, "thinks", talk, tools=TOOLS, enable_thinking=True))
    served = [Answer.of(engines.cached, spec.request_id).num_cached for spec in engines.requests]
    turn = engines.requests[0].boundaries[-1]
    assert turn.kind == "turn" and served == [0, 0, turn.num_tokens, turn.num_tokens]


def test_a_tenant_hits_only_its_own_snapshots(runner, planner):
    engines = Engines(runner)
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(random.Random(1), 20)}]
    secret = "s3cret salt"
    tenants = ["", secret, "another", secret, "", "another"]
    for number, tenant in enumerate(tenants):
        engines.ask(plan(planner, f"request {number}", talk, tenant=tenant, tools=TOOLS))
    status = engines.cached.core.prefixes.status()
    served = [Answer.of(engines.cached, spec.request_id).num_cached for spec in engines.requests]
    assert served == [0, 0, 0, *[engines.requests[0].boundaries[-1].num_tokens] * 3]
    assert [miss.reason for miss in status.recent_misses] == ["tenant", "tenant", "cold"]
    assert len({entry.tenant for entry in status.entries}) == 3
    assert secret not in repr(status), "the name of a tenant may be a password"
    assert not any(miss.stored_token_ids for miss in status.recent_misses)
    assert engines.cached.core.prefixes.store.integrity_error() is None


def see(planner: PromptPlanner, pictures: Sequence[ImagePatches], *more: str) -> EngineRequest:
    """A system part, all pictures in one turn, and turns behind it."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
    talk: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [*parts, {"type": "text", "text": "What colour is the picture?"}]},
    ]
    for words in more:
        talk += [{"role": "assistant", "content": "red"}, {"role": "user", "content": words}]
    return plan(planner, f"{len(pictures)} pictures", talk, images=tuple(pictures))


def test_another_image_misses_the_cache_and_gets_another_answer(runner, planner, picture):
    engines = Engines(runner)
    red, blue, again = picture("red"), picture("blue"), picture("red")
    spec = see(planner, [red])
    system, length = spec.boundaries[0].num_tokens, len(spec.token_ids)
    assert engines.ask(spec) == length
    assert engines.ask(see(planner, [blue])) == length - system
    told = engines.cached.core.prefixes.status().recent_misses[0]
    assert told.reason == "image" and told.num_cached == system
    assert told.num_common <= int(np.flatnonzero(spec.token_ids == runner.image_token_id)[0])
    rest = length - spec.boundaries[-1].num_tokens
    assert engines.ask(see(planner, [again])) == engines.ask(see(planner, [blue])) == rest < SLACK
    answers = [engines.cached.tokens[spec.request_id] for spec in engines.requests]
    assert answers[0] == answers[2] != answers[1] == answers[3]


def test_images_hit_only_a_prefix_with_the_same_images_in_the_same_order(runner, planner, picture):
    engines = Engines(runner)
    red, blue, green = picture("red"), picture("blue", "square"), picture("green", size=(96, 160))
    engines.ask(see(planner, [red, blue]))
    behind = len(engines.requests[0].token_ids) - engines.requests[0].boundaries[-1].num_tokens
    for pictures in ([blue, red], [red, green], [green, blue, red]):
        assert engines.ask(see(planner, pictures)) > behind + SLACK, "a prefix with another picture was served"
    assert engines.ask(see(planner, [red, blue])) == behind
    longer = see(planner, [red, blue], "And the second one?")
    assert engines.ask(longer) <= len(longer.token_ids) - engines.requests[0].boundaries[-1].num_tokens
    answers = {tuple(engines.cached.tokens[spec.request_id]) for spec in engines.requests[:3]}
    assert len(answers) > 1


def test_further_images_behind_a_cached_image_hit_the_turn_before(runner, planner, picture):
    """The same picture once more, and others, in a later turn: placed where they belong, whatever was restored."""
    engines = Engines(runner)
    red, blue, green = picture("red"), picture("blue"), picture("green", "square", (160, 96))
    first = see(planner, [red])
    engines.ask(first)
    turn = first.boundaries[-1].num_tokens
    for later in ([red], [blue], [green, blue]):
        parts = [{"type": "image"} for _ in later]
        talk: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is the picture?"}]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]},
        ]
        spec = plan(planner, "later", talk, images=(red, *later))
        assert common(spec.token_ids, first.token_ids) >= turn
        assert engines.ask(spec) <= len(spec.token_ids) - turn
        assert engines.ask(spec) == len(spec.token_ids) - spec.boundaries[-1].num_tokens


def test_a_miss_tells_whether_its_snapshot_was_cleared_or_evicted(runner):
    requests = [plain_request(f"r{i}", plain_tokens(i, 60), plain_tokens(i, 9), max_tokens=1) for i in range(2)]
    driver = Driver(runner, cache_config(boundaries=("system",)))
    driver.run({0: requests[:1]})
    driver.core.prefixes.clear()
    driver.run({0: [replace(requests[0], request_id="cleared")]})
    told = driver.core.prefixes.status().recent_misses[0]
    assert (told.request_id, told.reason, told.boundary_tokens) == ("cleared", "cleared", 60)
    room = 2.5 * driver.core.prefixes.status().num_bytes / 2**30
    driver = Driver(runner, cache_config(boundaries=("system",), max_gb=room))
    driver.run({0: requests[:2]})
    driver.run({0: [replace(requests[0], request_id="used")]})  # so that the other one goes
    assert driver.core.prefixes.memory.evict()
    driver.run({0: [replace(requests[0], request_id="still there")], 1: [replace(requests[1], request_id="evicted")]})
    assert Answer.of(driver, "still there").num_cached == 60
    told = driver.core.prefixes.status().recent_misses[0]
    assert (told.request_id, told.reason, told.num_common, told.boundary_tokens) == ("evicted", "evicted", 60, 60)
