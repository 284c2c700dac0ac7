"""The openai SDK on responses."""

from typing import Any

import openai
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
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.openai_responses import TOOLS, calls_of, history, items, outputs, respond, thought_of

pytestmark = [pytest.mark.server, pytest.mark.night("the gate runs this SDK over a scripted backend")]

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_text_is_answered(client: openai.OpenAI, streamed: bool):
    response = respond(client, streamed, input=CAPITAL_QUESTION)
    assert (response.output_text, response.status) == (CAPITAL, "completed")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_instructions_are_a_system_message(client: openai.OpenAI):
    response = respond(client, input="Where do you live?", instructions="You are Kira, a baker from Oakdale.")
    assert "Oakdale" in response.output_text


def test_events_come_in_their_order(client: openai.OpenAI):
    with client.responses.stream(model=MODEL, input=CAPITAL_QUESTION) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    numbers = [event.sequence_number for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    order = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
    order = [f"response.{name}" for name in [*order, "content_part.done", "output_item.done"]]
    assert [kinds.index(name) for name in order] == sorted(kinds.index(name) for name in order)
    assert numbers == sorted(set(numbers))


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client: openai.OpenAI, streamed: bool):
    response = respond(client, streamed, input=WEATHER_QUESTION, tools=TOOLS)
    assert calls_of(response) == [(TOOL_NAME, {"city": "Paris"})]
    answer = respond(client, streamed, input=history(WEATHER_QUESTION, response), tools=TOOLS)
    assert answer.output_text == WEATHER


@STREAMED
def test_a_stored_response_is_continued(client: openai.OpenAI, streamed: bool):
    first = respond(client, streamed, input=TWO_CITIES_QUESTION, tools=TOOLS, store=True)
    assert calls_of(first) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    answer = respond(client, streamed, input=outputs(first), tools=TOOLS, previous_response_id=first.id)
    assert "Paris" in answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": TOOL_NAME}], ids=["required", "named"])
def test_a_forced_tool_is_called_even_for_a_greeting(client: openai.OpenAI, choice: Any):
    response = respond(client, input="Hello!", tools=TOOLS, tool_choice=choice, max_output_tokens=200)
    assert [name for name, _ in calls_of(response)][:1] == [TOOL_NAME]


@STREAMED
def test_a_thought_is_an_item_of_its_own(client: openai.OpenAI, streamed: bool):
    response = respond(client, streamed, input=CAPITAL_QUESTION, reasoning={"effort": "low", "summary": "auto"})
    assert (thought_of(response), response.output_text) == (CAPITAL_THOUGHT, CAPITAL)


def test_encrypted_reasoning_can_be_sent_back_with_a_tool_result(client: openai.OpenAI):
    options: dict[str, Any] = {
        "tools": TOOLS,
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    response = respond(client, input=WEATHER_QUESTION, **options)
    assert thought_of(response) == WEATHER_THOUGHT
    assert items(response, "reasoning")[0].encrypted_content
    assert respond(client, input=history(WEATHER_QUESTION, response), **options).output_text == WEATHER


@pytest.mark.parametrize("effort", [None, "low"], ids=["at once", "thinking"])
def test_a_parsed_response_is_an_object_of_the_schema(client: openai.OpenAI, effort: Any):
    options: dict[str, Any] = {} if effort is None else {"reasoning": {"effort": effort}}
    response = client.responses.parse(model=MODEL, input=PERSON_QUESTION, text_format=Person, **options)
    assert response.output_parsed == EMMA


def test_an_image_is_seen(client: openai.OpenAI, red_circle: str):
    image = {"type": "input_image", "image_url": red_circle, "detail": "auto"}
    parts = [{"type": "input_text", "text": SHAPE_QUESTION}, image]
    assert SHAPE in respond(client, input=[{"role": "user", "content": parts}]).output_text


def test_an_empty_input_with_one_token_is_answered(client: openai.OpenAI):
    assert respond(client, input="", max_output_tokens=1).status in ("incomplete", "completed")


def test_answer_at_the_token_limit_is_incomplete(client: openai.OpenAI):
    response = respond(client, input="Tell me a story.", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 5


def test_an_unknown_model_and_an_unknown_response_are_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-none", input="Hello!")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Hello!", previous_response_id="resp_none")
    assert "resp_none" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"temperature": 5}, "temperature"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0]"),
        ({"include": ["file_search_call.results"]}, "include"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named(client: openai.OpenAI, fields: Any, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hello!", **fields)
    assert (caught.value.param or "").startswith(param)
