"""LiteLLM as a client of both dialects."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.processing.message import image_sources
from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    EMMA,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.litellm_completions import OWN_WARNINGS, complete, main_loop, options_of, thinking_options
from tests.support.sdks.openai_chat import TOOLS, results, user

SDKS = ("litellm",)

pytestmark = OWN_WARNINGS

PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    with main_loop():
        yield


@PROVIDERS
@STREAMED
def test_two_tool_calls_and_their_results_lead_to_an_answer(base_url: str, backend, provider: str, streamed: bool):
    options: dict[str, Any] = {"tools": TOOLS, **({} if provider == "openai" else thinking_options(provider))}
    conversation = [user(TWO_CITIES_QUESTION)]
    choice = complete(base_url, provider, conversation, streamed, **options)
    calls = [call.function for call in choice.message.tool_calls]
    assert [(call.name, json.loads(call.arguments)["city"]) for call in calls] == [
        (TOOL_NAME, city) for city in TWO_CITIES
    ]
    assert choice.finish_reason == "tool_calls"
    assert provider == "openai" or choice.message.reasoning_content == WEATHER_THOUGHT
    conversation += [choice.message, *results(choice.message)]
    choice = complete(base_url, provider, conversation, streamed, **options)
    assert choice.message.content == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)
    assert choice.finish_reason == "stop"
    assert provider == "openai" or backend.asked[1].messages[1]["reasoning_content"] == WEATHER_THOUGHT


def test_an_answer_follows_the_schema(base_url: str, backend):
    choice = complete(base_url, "openai", [user(PERSON_QUESTION)], response_format=Person)
    assert Person.model_validate_json(choice.message.content) == EMMA
    assert list(json.loads(backend.asked[0].grammar.text)["properties"]) == list(Person.model_fields)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_an_image_reaches_the_backend(base_url: str, backend, provider: str, red_circle: str):
    parts = [{"type": "text", "text": SHAPE_QUESTION}, {"type": "image_url", "image_url": {"url": red_circle}}]
    assert complete(base_url, provider, [user(parts)]).message.content == SHAPE
    assert [image.url for image in image_sources(backend.asked[0].messages)] == [red_circle]


def test_a_response_is_answered(base_url: str):
    import litellm

    response: Any = litellm.responses(input=CAPITAL_QUESTION, **options_of(base_url, "openai"))
    assert response.output[-1].content[0].text == CAPITAL


def test_a_text_is_embedded(base_url: str):
    import litellm

    answer: Any = litellm.embedding(input=[CAPITAL_QUESTION], encoding_format="float", **options_of(base_url, "openai"))
    assert answer.data[0]["embedding"] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("provider", "path"), [("hosted_vllm", "/v1"), ("jina_ai", "/v1"), ("cohere", ""), ("cohere", "/v2/rerank")]
)
def test_documents_are_reranked(base_url: str, provider: str, path: str):
    import litellm

    options = {**options_of(base_url, provider), "api_base": base_url + path}
    answer: Any = litellm.rerank(query="which?", documents=["ab", "abcd", "abc"], top_n=2, **options)
    assert [(one["index"], one["relevance_score"]) for one in answer.results] == [(1, 0.4), (2, 0.3)]
    assert answer.results[0]["document"] == {"text": "abcd"}


@PROVIDERS
def test_an_unknown_model_and_a_bad_field_are_errors_of_their_own(base_url: str, provider: str):
    from litellm.exceptions import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError):
        complete(base_url, provider, [user("Hello!")], model=f"{provider}/none")
    with pytest.raises(BadRequestError, match="temperature"):
        complete(base_url, provider, [user("Hello!")], temperature=5)
