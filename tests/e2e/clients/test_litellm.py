"""LiteLLM as a client of both dialects."""

import asyncio
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
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_DESCRIPTION,
    TOOL_NAME,
    TOOL_SCHEMA,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    Person,
)

pytestmark = [
    pytest.mark.server,
    # of its own models
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning"),
]

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA},
    }
]
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    """LiteLLM leaves tasks in the main thread's event loop, and makes one that stays open where there is none."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.set_event_loop(None)


def options_of(base_url: str, provider: str) -> dict[str, Any]:
    api_base = base_url if provider == "anthropic" else f"{base_url}/v1"
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": api_base,
        "api_key": "none",
        "num_retries": 0,
        "max_tokens": 200,
    }


def complete(base_url: str, provider: str, messages: list[Any], streamed: bool = False, **options: Any) -> Any:
    fields = {**options_of(base_url, provider), "messages": messages, **options}
    answer: Any = litellm.completion(stream=streamed, **fields)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0]


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


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
    conversation += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    assert complete(base_url, provider, conversation, streamed, tools=TOOLS).message.content == WEATHER


@pytest.mark.parametrize(
    ("provider", "thinking"),
    [
        ("hosted_vllm", {"reasoning_effort": "low"}),
        (
            "anthropic",
            {
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "max_tokens": 2000,
                "allowed_openai_params": ["thinking"],  # it knows models by name alone
            },
        ),
    ],
)
@STREAMED
def test_a_thought_is_apart_from_the_content(base_url: str, provider: str, thinking: Any, streamed: bool):
    message = complete(base_url, provider, [user(CAPITAL_QUESTION)], streamed, **thinking).message
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
    options = {**options_of(base_url, "openai")}
    options.pop("max_tokens")
    response: Any = litellm.responses(input=CAPITAL_QUESTION, **options)
    assert response.output[-1].content[0].text == CAPITAL


def test_a_text_is_embedded(base_url: str):
    options = {**options_of(base_url, "openai")}
    options.pop("max_tokens")
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
