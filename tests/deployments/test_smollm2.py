"""The graph with a small real model: right answers, conversations that are cached, and the same tokens either way."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.processing.checkpoint import resolve_checkpoint
from tests.deployments.demo_graph import DemoGraph
from tests.support.night import some_at_night

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def house() -> Iterator[DemoGraph]:
    house = DemoGraph(model="smollm2")
    yield house
    house.close()


async def say(house: DemoGraph, messages: Messages, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    answer = await house.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(*texts: str) -> Messages:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_question_gets_the_right_answer(house: DemoGraph):
    async def test():
        assert "Paris" in text_of(await say(house, asked("What is the capital of France?")))

    house.run(test)


def test_a_request_without_parameters_is_answered_and_finds_an_end(house: DemoGraph):
    async def test():
        body = {"model": "smollm2", "messages": asked("What is the capital of France?")}
        answer = (await house.http.post("/v1/chat/completions", json=body)).json()
        assert text_of(answer) == "The capital of France is Paris." and answer["choices"][0]["finish_reason"] == "stop"

    house.run(test)


@pytest.mark.night("properties/test_agent_conversation.py has hits and misses; weights change no hit")
def test_a_conversation_computes_only_its_new_tokens_and_says_the_same(house: DemoGraph):
    async def test():
        question = "I am planning a garden behind my house. Name three fruits that I could grow in it, please."
        first = await say(house, asked(question))
        messages = asked(question, text_of(first), "And three vegetables?")
        cached = await say(house, messages)
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
        cold = await say(house, messages, cache_salt="another")
        assert text_of(cached) == text_of(cold)

    house.run(test)


@pytest.mark.night("the gate compares batches with requests alone on tiny models, test_batch_invariants.py")
def test_a_stream_and_a_batch_give_the_tokens_of_a_request_alone(house: DemoGraph):
    async def test():
        questions = [asked(f"Tell me a fact about the number {number}.") for number in (7, 12, 30)]
        alone = [text_of(await say(house, question, cache_salt=str(i))) for i, question in enumerate(questions)]
        together = await asyncio.gather(*(say(house, question, cache_salt="x") for question in questions))
        assert list(map(text_of, together)) == alone
        body = {"model": "smollm2", "messages": questions[0], "temperature": 0, "max_tokens": 24, "stream": True}
        raw = (await house.http.post("/v1/chat/completions", json=body)).text
        events = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
        assert "".join(deltas) == alone[0]

    house.run(test)


UNEQUAL = ("The opposite of hot is", (" cold", " tall", " green and very old"))
QUESTIONS = [
    ("The capital of France is", (" Paris", " London", " Rome")),
    ("Water freezes at zero degrees", (" Celsius", " meters", " dollars")),
    UNEQUAL,
    ("Two plus two equals", (" four", " seven", " a banana")),
]


@pytest.fixture(scope="module")
def library(house: DemoGraph) -> tuple[Any, Any]:
    """The library's model and tokenizer; after the graph, which chooses the library for products."""
    from mlx_lm import load

    model, tokenizer, *_ = load(str(resolve_checkpoint("smollm2", None, weights=True)))
    return model, tokenizer


@pytest.mark.parametrize(
    "case",
    some_at_night(QUESTIONS, [UNEQUAL], "more questions; the gate has the one with choices of unequal lengths"),
    ids=lambda case: case[0],
)
def test_choices_are_scored_as_lm_eval_does_and_as_the_library_says(
    house: DemoGraph, library: tuple[Any, Any], case: tuple[str, tuple[str, ...]]
):
    """Its local-completions model sends prompt and choice as token ids, with echo, logprobs and one token more."""
    import mlx.core as mx

    (model, tokenizer), (question, choices) = library, case
    start, whole = encode(tokenizer, question), [encode(tokenizer, question + choice) for choice in choices]
    body = {"model": "smollm2", "prompt": whole, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}

    async def test():
        answer = (await house.http.post("/v1/completions", json={**body, "seed": 1234})).json()
        for ids, choice in zip(whole, answer["choices"], strict=True):
            logits = model(mx.array([ids]))[0, :-1].astype(mx.float32)
            expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            said, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert len(said) == len(ids) + 1 and said[0] is tops[0] is None
            own = expected[np.arange(len(ids) - 1), ids[1:]]
            np.testing.assert_allclose(said[1:-1], own, atol=0.01)  # the engine expands the 4-bit weights
            is_greedy = [one == max(top.values()) for one, top in zip(said[1:-1], tops[1:-1], strict=True)]
            assert is_greedy == (expected.argmax(axis=-1) == ids[1:]).tolist()
        sums = [sum(choice["logprobs"]["token_logprobs"][len(start) : -1]) for choice in answer["choices"]]
        assert sums[0] == max(sums), "the model knows the answer"

    house.run(test)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_structured_output_follows_its_schema(house: DemoGraph):
    async def test():
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
        answer = await say(house, asked("Name a city in Italy."), response_format=form, max_tokens=60)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert json.loads(text_of(answer)).keys() == {"city"}

    house.run(test)
