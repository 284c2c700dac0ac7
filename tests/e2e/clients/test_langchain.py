"""LangChain's chat models of both dialects, and its embeddings."""

from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import OpenAIEmbeddings

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
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Person,
    person_call_question,
)
from tests.support.sdks.langchain_models import chat_model, invoke, weather_tool

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

FACES = pytest.mark.parametrize("face", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

get_weather = weather_tool()


@FACES
@STREAMED
def test_a_question_is_answered(base_url: str, face: str, streamed: bool):
    message = invoke(chat_model(base_url, face), [HumanMessage(CAPITAL_QUESTION)], streamed)
    assert message.text == CAPITAL
    assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] > 0


@FACES
@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(base_url: str, face: str, streamed: bool):
    model = chat_model(base_url, face).bind_tools([get_weather])
    conversation: list[BaseMessage] = [SystemMessage("Use the tools when needed."), HumanMessage(WEATHER_QUESTION)]
    message = invoke(model, conversation, streamed)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [(TOOL_NAME, {"city": "Paris"})]
    conversation += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert isinstance(conversation[-1], ToolMessage)
    assert invoke(model, conversation, streamed).text == WEATHER


@FACES
def test_message_with_two_tool_calls_is_read_as_two_calls(base_url: str, face: str):
    model = chat_model(base_url, face).bind_tools([get_weather])
    message = model.invoke(TWO_CITIES_QUESTION)
    assert [call["args"]["city"] for call in message.tool_calls] == TWO_CITIES


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
def test_an_answer_is_an_object_of_the_schema(base_url: str, face: str, method: str):
    model: Any = chat_model(base_url, face).with_structured_output(Person, method=method)
    is_tool = method == "function_calling"
    assert model.invoke(person_call_question("Person") if is_tool else PERSON_QUESTION) == EMMA


@STREAMED
def test_a_thinking_block_is_apart_from_the_text(base_url: str, streamed: bool):
    model = chat_model(base_url, "messages", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    message = invoke(model, [HumanMessage(CAPITAL_QUESTION)], streamed)
    [thought] = [block for block in message.content_blocks if block["type"] == "reasoning"]
    assert (thought.get("reasoning", "").strip(), message.text) == (CAPITAL_THOUGHT, CAPITAL)


def test_a_reasoning_item_is_apart_from_the_text(base_url: str):
    model = chat_model(base_url, "responses", reasoning={"effort": "low", "summary": "auto"})
    message = model.invoke(CAPITAL_QUESTION)
    assert any(block["type"] == "reasoning" for block in message.content_blocks)
    assert message.text == CAPITAL


@FACES
def test_an_image_is_seen(base_url: str, face: str, red_circle: str):
    image = {"type": "image_url", "image_url": {"url": red_circle}}
    question = HumanMessage([{"type": "text", "text": SHAPE_QUESTION}, image])
    assert SHAPE in chat_model(base_url, face).invoke([question]).text


def test_texts_are_embedded(base_url: str):
    options: dict[str, Any] = {"model": MODEL, "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(base_url=f"{base_url}/v1", **options)
    first, second = embeddings.embed_documents([CAPITAL_QUESTION, WEATHER_QUESTION])
    assert len(first) == len(second) > 1 and first != second


@FACES
def test_an_unknown_model_is_not_found(base_url: str, face: str):
    error = anthropic.NotFoundError if face == "messages" else openai.NotFoundError
    with pytest.raises(error):
        chat_model(base_url, face, model="none").invoke("Hello!")


@FACES
def test_a_bad_field_is_named(base_url: str, face: str):
    error = anthropic.BadRequestError if face == "messages" else openai.BadRequestError
    with pytest.raises(error, match="top_p"):
        chat_model(base_url, face, top_p=5).invoke("Hello!")
