"""The ollama SDK on the routes of Ollama's API."""

import math
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.ollama_chat import GREEDY, TOOLS, calls_of, chat, results, user

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    with ollama.Client(host=base_url, timeout=120) as client:
        yield client


@STREAMED
def test_a_question_is_answered_with_figures(client: Any, streamed: bool):
    answer = chat(client, [user(CAPITAL_QUESTION)], streamed, think=False)
    assert (answer.message.content, answer.message.thinking, answer.done_reason) == (CAPITAL, None, "stop")
    assert answer.prompt_eval_count > 1 and answer.eval_count > 1
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert 0 < answer.eval_duration < answer.total_duration and parts <= answer.total_duration


@STREAMED
def test_the_model_thinks_unless_it_is_told_not_to(client: Any, streamed: bool):
    message = chat(client, [user(CAPITAL_QUESTION)], streamed).message
    assert (message.thinking.strip(), message.content) == (CAPITAL_THOUGHT, CAPITAL)


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client: Any, streamed: bool):
    conversation: list[Any] = [user(WEATHER_QUESTION)]
    message = chat(client, conversation, streamed, tools=TOOLS, think=True).message
    assert message.thinking.strip() == WEATHER_THOUGHT
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})] and not message.content
    answer = chat(client, [*conversation, message, *results(message)], streamed, tools=TOOLS, think=False)
    assert (answer.message.content, answer.done_reason) == (WEATHER, "stop")


def test_an_image_is_seen_in_chat_and_in_generate(client: Any, red_circle_png: bytes):
    message = chat(client, [user(SHAPE_QUESTION, images=[red_circle_png])], think=False).message
    assert SHAPE in message.content
    found = client.generate(MODEL, SHAPE_QUESTION, images=[red_circle_png], think=False, options=GREEDY)
    assert found.response == message.content


def test_a_schema_is_enforced(client: Any):
    answer = chat(client, [user(PERSON_QUESTION)], format=Person.model_json_schema(), think=False)
    assert Person.model_validate_json(answer.message.content) == EMMA


@STREAMED
def test_an_answer_ends_at_num_predict_and_at_a_stop_string(client: Any, streamed: bool):
    fields: dict[str, Any] = {"streamed": streamed, "think": False}
    short = chat(client, [user(CAPITAL_QUESTION)], options={**GREEDY, "num_predict": 2}, **fields)
    assert (short.done_reason, short.eval_count) == ("length", 2) and CAPITAL.startswith(short.message.content)
    stopped = chat(client, [user(CAPITAL_QUESTION)], options={**GREEDY, "stop": [" France"]}, **fields)
    assert (stopped.done_reason, stopped.message.content) == ("stop", CAPITAL.partition(" France")[0])


def test_generate_with_a_system_prompt_and_with_a_raw_prompt(client: Any):
    found = client.generate(MODEL, CAPITAL_QUESTION, system="Be brief.", think=False, options=GREEDY)
    assert found.response == CAPITAL
    raw = client.generate(MODEL, CAPITAL_QUESTION, raw=True, options={**GREEDY, "num_predict": 4})
    assert raw.prompt_eval_count < found.prompt_eval_count


def test_logprobs_are_those_of_the_tokens(client: Any):
    answer = chat(client, [user(CAPITAL_QUESTION)], think=False, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in answer.logprobs).startswith(CAPITAL)
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in answer.logprobs)


def test_texts_are_embedded(client: Any):
    first, second = client.embed(MODEL, [CAPITAL_QUESTION, WEATHER_QUESTION]).embeddings
    assert math.hypot(*first) == pytest.approx(1, abs=1e-3) and first != second
    assert client.embeddings(MODEL, CAPITAL_QUESTION).embedding == pytest.approx(first, abs=1e-5)


def test_the_model_is_described(client: Any):
    [model] = [one for one in client.list().models if one.model == f"{MODEL}:latest"]
    assert model.size > 10**6 and len(model.digest) == 64
    shown = client.show(model.model)
    assert set(shown.capabilities) >= {"completion", "tools", "vision", "thinking"}
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 32768
    assert client.ps().models[0].context_length == 32768
