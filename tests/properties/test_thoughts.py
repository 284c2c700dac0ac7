"""Thinking on the demo model with grammars, tools and budgets behind the thought: alone, in a batch, with drafts."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.processing.answer_constraint import answer_constraint
from engine.processing.answer_parser import AnswerDelta, AnswerRules
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, FinishReason, GrammarSpec, Progress, SamplingParams, ThoughtSpec
from tests.support.cold_runner import load_cold
from tests.support.conversations import DRAFTS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
            "required": ["name", "age", "city"],
            "additionalProperties": False,
        }
    ),
)
EMMA = [
    {"role": "system", "content": "Answer with JSON only. Keys: name, age, city."},
    {"role": "user", "content": "Emma is 31 years old. Emma lives in Oslo."},
]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 47 + 38?"}]

Results = dict[str, tuple[tuple[int, ...], FinishReason | None]]
Run = Callable[[Callable[[AsyncEngine], Coroutine[Any, Any, Any]]], Any]
"""run(work) -> the result of work(engine)."""


def make(tokenizer: ChatTokenizer, name: str, messages: Any, **constraint: Any) -> EngineRequest:
    given: dict[str, Any] = {
        **{"tools": [], "choice_mode": "auto", "choice_names": (), "parallel": True, "grammar": None},
        **{"is_thinking": True, "budget": None},
    }
    given |= constraint
    sampling = SamplingParams(**{"max_tokens": 200, "temperature": 0.0, **given.pop("sampling", {})})
    kwargs: dict[str, Any] = {"enable_thinking": given["is_thinking"]}
    if given["tools"]:
        kwargs["tools"] = given["tools"]
    grammar, thought = answer_constraint(tokenizer, **given)
    ids = tokenizer.encode_chat(messages, template_kwargs=kwargs)
    return EngineRequest(name, ids, sampling, tokenizer.stop_token_ids, grammar=grammar, thought=thought)


def requests(tokenizer: ChatTokenizer) -> dict[str, EngineRequest]:
    noisy = {"sampling": {"temperature": 1.0, "seed": 7}}
    made = [
        make(tokenizer, "json", EMMA, grammar=PERSON),
        make(tokenizer, "json, hot", EMMA, grammar=PERSON, **noisy),
        make(tokenizer, "required", PARIS, tools=[WEATHER], choice_mode="required"),
        make(tokenizer, "auto", PARIS, tools=[WEATHER]),
        make(
            tokenizer,
            "named, hot",
            SUM,
            tools=[WEATHER],
            choice_mode="required",
            choice_names=("get_weather",),
            **noisy,
        ),
        make(tokenizer, "budget", SUM, budget=5),
        make(tokenizer, "budget 0", SUM, budget=0),
        make(tokenizer, "budget and json", EMMA, grammar=PERSON, budget=5),
        make(tokenizer, "plain", SUM),
    ]
    return {request.request_id: request for request in made}


@contextmanager
def started(**config: Any) -> Iterator[Run]:
    """An engine of the demo model in an event loop of its own, which runs within each call."""

    async def start() -> AsyncEngine:
        given = EngineConfig.model_validate({"model": "demo", **config})
        return AsyncEngine(given, lambda config, progress: load_cold(config))

    with asyncio.Runner() as loop:
        engine = loop.run(start())
        try:
            loop.run(engine.wait_ready())
            yield lambda work: loop.run(work(engine))
        finally:
            loop.run(engine.shutdown())


async def collect(engine: AsyncEngine, request: EngineRequest) -> tuple[tuple[int, ...], FinishReason | None]:
    tokens, finish = [], None
    async for chunk in engine.generate(request):
        assert chunk.error is None
        tokens += chunk.token_ids
        finish = chunk.finish_reason or finish
    return tuple(tokens), finish


async def alone(engine: AsyncEngine, made: dict[str, EngineRequest]) -> Results:
    return {name: await collect(engine, request) for name, request in made.items()}


async def together(engine: AsyncEngine, made: dict[str, EngineRequest]) -> Results:
    found = await asyncio.gather(*(collect(engine, request) for request in made.values()))
    return dict(zip(made, found, strict=True))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """On one engine with drafts. Requests of a tenant of their own find nothing in its prefix cache."""
    with started(mtp=DRAFTS) as run:
        yield run


@pytest.fixture(scope="module")
def answers(tokenizer: ChatTokenizer, run: Run) -> Results:
    """Alone, with drafts."""
    return run(lambda engine: alone(engine, requests(tokenizer)))


def parse(tokenizer: ChatTokenizer, token_ids: tuple[int, ...]) -> AnswerDelta:
    parser = tokenizer.answer_parser(AnswerRules(tools=(WEATHER,), is_thinking=True))
    parts = parser.push(token_ids), parser.finish()
    content, reasoning = ("".join(texts) for texts in zip(*(part[:2] for part in parts), strict=True))
    return AnswerDelta(content, reasoning, parts[0].tool_calls + parts[1].tool_calls)


def test_json_follows_the_thought(tokenizer: ChatTokenizer, answers: Results):
    for name in ("json", "json, hot", "budget and json"):
        token_ids, finish = answers[name]
        answer = parse(tokenizer, token_ids)
        assert finish is FinishReason.STOP and set(json.loads(answer.content)) == {"name", "age", "city"}
    assert json.loads(parse(tokenizer, answers["json"][0]).content) == {"name": "Emma", "age": 31, "city": "Oslo"}
    assert parse(tokenizer, answers["json"][0]).reasoning


def test_a_tool_call_follows_the_thought(tokenizer: ChatTokenizer, answers: Results):
    for name in ("required", "auto"):
        [call] = parse(tokenizer, answers[name][0]).tool_calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert parse(tokenizer, answers["named, hot"][0]).tool_calls[0].name == "get_weather"


def test_a_budget_ends_the_thought_with_the_templates_closing(tokenizer: ChatTokenizer, answers: Results):
    closing = tokenizer.encode_text("\n</think>\n\n").tolist()

    for name, budget in (("budget", 5), ("budget 0", 0), ("budget and json", 5)):
        token_ids = list(answers[name][0])
        assert token_ids[budget : budget + len(closing)] == closing
    assert answers["budget"][0][:5] == answers["plain"][0][:5]
    assert answers["budget"][1] is FinishReason.STOP


def test_answers_are_the_same_in_a_batch_as_alone(tokenizer: ChatTokenizer, run: Run, answers: Results):
    made = {name: replace(request, tenant="batch") for name, request in requests(tokenizer).items()}
    assert run(lambda engine: together(engine, made)) == answers


def test_answers_cut_anywhere_go_on_with_the_same_tokens(
    request: pytest.FixtureRequest, tokenizer: ChatTokenizer, run: Run, answers: Results
):
    """Cut within the thought, its closing, the JSON and the call: budget and grammar go on where they were."""
    made = requests(tokenizer)
    cuts = {
        f"{name} {cut}": (name, cut)
        for name, (token_ids, _) in answers.items()
        for cut in sorted(
            {0, 1, 4, 5, 7, len(token_ids) // 2, len(token_ids) - 2, len(token_ids) - 1}
            if request.config.option.night
            else {5, len(token_ids) // 2, len(token_ids) - 2}
        )
        if 0 <= cut < len(token_ids)
    }
    begun = {
        key: replace(made[name], request_id=key, tenant="cut", progress=(Progress(answers[name][0][:cut]),))
        for key, (name, cut) in cuts.items()
    }
    found = run(lambda engine: together(engine, begun))
    expected = {key: (answers[name][0][cut:], answers[name][1]) for key, (name, cut) in cuts.items()}
    assert found == expected and len(cuts) > (50 if request.config.option.night else 20)


def test_tokens_that_the_grammar_or_the_budget_forbids_are_not_continued(tokenizer: ChatTokenizer, run: Run):
    made = requests(tokenizer)
    word = tuple(tokenizer.encode_text(" word").tolist())
    closed = tuple(tokenizer.encode_text("\n</think>\n\n").tolist())
    for name, token_ids in (("budget", word * 6), ("json", closed + word)):
        wrong = replace(made[name], progress=(Progress(token_ids),))
        with pytest.raises(InvalidRequest, match=rf"progress\[0\]: its {len(token_ids)} tokens do not match"):
            run(lambda engine, wrong=wrong: collect(engine, wrong))


def test_answers_are_the_same_with_and_without_drafts(tokenizer: ChatTokenizer, answers: Results):
    with started(mtp="off") as run:
        assert run(lambda engine: alone(engine, requests(tokenizer))) == answers


def test_each_choice_gives_valid_json_behind_its_own_thought(tokenizer: ChatTokenizer, run: Run):
    hot = make(tokenizer, "hot", EMMA, grammar=PERSON, sampling={"temperature": 1.0, "seed": 7})

    async def work(engine: AsyncEngine) -> list[tuple[int, ...]]:
        rows: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in engine.generate(replace(hot, num_choices=3, tenant="choices")):
            rows[chunk.index] += chunk.token_ids
        return [tuple(row) for row in rows.values()]

    for row in run(work):
        assert set(json.loads(parse(tokenizer, row).content)) == {"name", "age", "city"}


@pytest.mark.parametrize(
    ("thought", "reason"),
    [
        (ThoughtSpec(9, (9,), -1), "budget is -1"),
        (ThoughtSpec(9, (10,)), "not in closing_ids"),
        (ThoughtSpec(9, (9, 10**6)), "token id 1000000"),
    ],
)
def test_an_invalid_thought_specification_is_refused(
    tokenizer: ChatTokenizer, run: Run, thought: ThoughtSpec, reason: str
):
    bad = replace(make(tokenizer, "bad", SUM), thought=thought)

    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match=reason):
            await collect(engine, bad)

    run(work)
