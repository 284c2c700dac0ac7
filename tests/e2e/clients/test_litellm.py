"""LiteLLM as a client of both dialects."""

import json
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from litellm.exceptions import BadRequestError, NotFoundError

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    WEATHER,
    WEATHER_QUESTION,
    Person,
)
from tests.support.sdks.litellm_completions import OWN_WARNINGS, complete, main_loop, options_of, thinking_options
from tests.support.sdks.openai_chat import TOOLS, results, user

pytestmark = [pytest.mark.server, *OWN_WARNINGS, pytest.mark.night("the gate runs this SDK over a scripted backend")]

PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    with main_loop():
        yield


@PROVIDERS
@STREAMED
def test_a_question_is_answered(base_url: str, provider: str, streamed: bool):
    choice = complete(base_url, provider, [user(CAPITAL_QUESTION)], streamed)
    assert (choice.message.content, choice.finish_reason) == (CAPITAL, "stop")


@PROVIDERS
@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(base_url: str, provider: str, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    message = complete(base_url, provider, conversation, streamed, tools=TOOLS).message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (TOOL_NAME, {"city": "Paris"})
    conversation += [message, *results(message)]
    assert complete(base_url, provider, conversation, streamed, tools=TOOLS).message.content == WEATHER


@pytest.mark.parametrize("provider", ["hosted_vllm", "anthropic"])
@STREAMED
def test_a_thought_is_apart_from_the_content(base_url: str, provider: str, streamed: bool):
    options = thinking_options(provider)
    message = complete(base_url, provider, [user(CAPITAL_QUESTION)], streamed, **options).message
    assert (message.reasoning_content.strip(), message.content) == (CAPITAL_THOUGHT, CAPITAL)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_an_answer_follows_the_schema(base_url: str, provider: str):
    choice = complete(base_url, provider, [user(PERSON_QUESTION)], response_format=Person)
    assert Person.model_validate_json(choice.message.content) == EMMA


@PROVIDERS
def test_an_image_is_seen(base_url: str, provider: str, red_circle: str):
    parts = [{"type": "text", "text": SHAPE_QUESTION}, {"type": "image_url", "image_url": {"url": red_circle}}]
    assert SHAPE in complete(base_url, provider, [user(parts)]).message.content


def test_a_response_is_answered(base_url: str):
    options = options_of(base_url, "openai")
    response: Any = litellm.responses(input=CAPITAL_QUESTION, **options)
    assert response.output[-1].content[0].text == CAPITAL


def test_a_text_is_embedded(base_url: str):
    options = options_of(base_url, "openai")
    answer: Any = litellm.embedding(input=[CAPITAL_QUESTION], encoding_format="float", **options)
    assert len(answer.data[0]["embedding"]) > 1


@PROVIDERS
def test_an_unknown_model_is_not_found(base_url: str, provider: str):
    with pytest.raises(NotFoundError):
        complete(base_url, provider, [user("Hello!")], model=f"{provider}/none")


@PROVIDERS
def test_a_bad_field_is_named(base_url: str, provider: str):
    with pytest.raises(BadRequestError, match="temperature"):
        complete(base_url, provider, [user("Hello!")], temperature=5)
