"""LangChain's chat models of both dialects, and its embeddings."""

from typing import Any

import pytest

from engine.processing.message import image_sources
from tests.e2e.clients.questions import (
    CAPITAL_QUESTION,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
    Person,
    person_call_question,
)
from tests.support.sdks.langchain_models import chat_model, invoke, weather_tool

SDKS = ("langchain_openai", "langchain_anthropic")

FACES = pytest.mark.parametrize("face", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

THINKING: dict[str, dict[str, Any]] = {
    "chat": {"reasoning_effort": "low"},
    "responses": {"reasoning": {"effort": "low", "summary": "auto"}},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
}
"""The options of each face that ask for a thought."""


@FACES
@STREAMED
def test_two_tool_calls_and_their_results_lead_to_an_answer(base_url: str, backend, face: str, streamed: bool):
    from langchain_core.messages import HumanMessage, SystemMessage

    tool = weather_tool()
    model = chat_model(base_url, face, **THINKING[face]).bind_tools([tool])
    conversation: list[Any] = [SystemMessage("Use the tools when needed."), HumanMessage(TWO_CITIES_QUESTION)]
    message = invoke(model, conversation, streamed)
    assert [(call["name"], call["args"]["city"]) for call in message.tool_calls] == [
        (TOOL_NAME, city) for city in TWO_CITIES
    ]
    thoughts = [block.get("reasoning") for block in message.content_blocks if block["type"] == "reasoning"]
    assert thoughts == ([] if face == "chat" else [WEATHER_THOUGHT])
    conversation += [message, *(tool.invoke(call) for call in message.tool_calls)]
    answer = invoke(model, conversation, streamed)
    assert answer.text == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)
    assert answer.usage_metadata is not None and answer.usage_metadata["input_tokens"] == 7
    said = backend.asked[1].messages[2]
    assert face == "chat" or said["reasoning_content"] == WEATHER_THOUGHT


@pytest.mark.parametrize(
    ("face", "method"),
    [
        ("chat", "json_schema"),
        ("chat", "json_mode"),
        ("chat", "function_calling"),
        ("responses", "json_schema"),
        ("messages", "json_schema"),
        ("messages", "function_calling"),
    ],
)
def test_an_answer_is_an_object_of_the_schema(base_url: str, backend, face: str, method: str):
    model: Any = chat_model(base_url, face).with_structured_output(Person, method=method)
    is_tool = method == "function_calling"
    assert model.invoke(person_call_question("Person") if is_tool else PERSON_QUESTION) == EMMA
    [request] = backend.asked
    assert (request.grammar is None) == is_tool and [tool.name for tool in request.tools] == ["Person"] * is_tool


@FACES
def test_an_image_reaches_the_backend(base_url: str, backend, face: str, red_circle: str):
    from langchain_core.messages import HumanMessage

    image = {"type": "image_url", "image_url": {"url": red_circle}}
    question = HumanMessage([{"type": "text", "text": SHAPE_QUESTION}, image])
    assert chat_model(base_url, face).invoke([question]).text == SHAPE
    assert [image.url for image in image_sources(backend.asked[0].messages)] == [red_circle]


def test_texts_are_embedded(base_url: str):
    from langchain_openai import OpenAIEmbeddings

    options: dict[str, Any] = {"model": MODEL, "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(base_url=f"{base_url}/v1", **options)
    vectors = embeddings.embed_documents([CAPITAL_QUESTION, WEATHER_QUESTION])
    assert vectors == [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]


@FACES
def test_an_unknown_model_and_a_bad_field_are_errors_of_the_sdk(base_url: str, face: str):
    import anthropic
    import openai

    sdk = anthropic if face == "messages" else openai
    with pytest.raises(sdk.NotFoundError):
        chat_model(base_url, face, model="none").invoke("Hello!")
    with pytest.raises(sdk.BadRequestError, match="top_p"):
        chat_model(base_url, face, top_p=5).invoke("Hello!")
