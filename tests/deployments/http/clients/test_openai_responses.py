"""The openai SDK on responses."""

from typing import Any

import pytest

from deployments.requests import Route, ToolChoice
from engine.errors import EngineFailed
from engine.processing.message import image_sources
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
    WEATHER_RESULT,
    WEATHER_THOUGHT,
    Person,
)
from tests.support.sdks.openai_responses import TOOLS, calls_of, history, items, outputs, respond, thought_of

SDKS = ("openai",)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_text_is_answered_with_usage(client, backend, streamed: bool):
    response = respond(client, streamed, input=CAPITAL_QUESTION, instructions="Be brief.")
    assert (response.output_text, response.status) == (CAPITAL, "completed")
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (7, 5)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 7
    assert backend.asked[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_events_of_thought_call_and_text_come_in_their_order(client):
    with client.responses.stream(
        model=MODEL, input=WEATHER_QUESTION, tools=TOOLS, reasoning={"effort": "low", "summary": "auto"}
    ) as stream:
        events = list(stream)
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model=MODEL, input=CAPITAL_QUESTION) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
    order = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert list(dict.fromkeys(kinds)) == ["created", "in_progress", *order, "output_item.done", "completed"]
    assert kinds.count("output_text.delta") > 1


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client, backend, streamed: bool):
    response = respond(client, streamed, input=WEATHER_QUESTION, tools=TOOLS)
    assert calls_of(response) == [(TOOL_NAME, {"city": "Paris"})]
    answer = respond(client, streamed, input=history(WEATHER_QUESTION, response), tools=TOOLS)
    assert (answer.output_text, answer.status) == (WEATHER, "completed")
    assert backend.asked[1].messages[-1]["content"] == WEATHER_RESULT


@STREAMED
def test_a_stored_response_with_two_calls_is_continued(client, backend, streamed: bool):
    import openai

    first = respond(client, streamed, input=TWO_CITIES_QUESTION, tools=TOOLS, store=True)
    assert calls_of(first) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    assert len({call.call_id for call in items(first, "function_call")}) == 2
    answer = respond(client, streamed, input=outputs(first), tools=TOOLS, previous_response_id=first.id)
    assert answer.output_text == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)
    assert [message["role"] for message in backend.asked[1].messages] == ["user", "assistant", "tool", "tool"]
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_forced_tool_is_called_even_for_a_greeting(client, backend):
    response = respond(client, input="Hello!", tools=TOOLS, tool_choice={"type": "function", "name": TOOL_NAME})
    assert calls_of(response) == [(TOOL_NAME, {"city": "Paris"})]
    assert backend.asked[0].tool_choice == ToolChoice("required", (TOOL_NAME,))


@pytest.mark.parametrize(("streamed", "summary"), [(False, None), (True, "auto")], ids=["whole", "streamed summary"])
def test_a_thought_is_an_item_of_its_own(client, streamed: bool, summary: Any):
    response = respond(client, streamed, input=CAPITAL_QUESTION, reasoning={"effort": "low", "summary": summary})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (thought_of(response), response.output_text) == (CAPITAL_THOUGHT, CAPITAL)
    assert bool(response.output[0].summary) == (summary == "auto")


def test_encrypted_reasoning_can_be_sent_back_with_a_tool_result(client, backend):
    options: dict[str, Any] = {
        "tools": TOOLS,
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    response = respond(client, True, input=WEATHER_QUESTION, **options)
    conversation = history(WEATHER_QUESTION, response)
    [thought] = [item for item in conversation if item.get("type") == "reasoning"]
    thought.pop("content", None)
    assert WEATHER_THOUGHT not in str(thought) and thought["encrypted_content"]
    assert respond(client, input=conversation, **options).output_text == WEATHER
    assert backend.asked[1].messages[1]["reasoning_content"] == WEATHER_THOUGHT


def test_a_parsed_response_is_an_object_of_the_schema(client, backend):
    reasoning: Any = {"effort": "low"}
    response = client.responses.parse(model=MODEL, input=PERSON_QUESTION, text_format=Person, reasoning=reasoning)
    assert response.output_parsed == EMMA and backend.asked[0].grammar.kind == "json_schema"


def test_an_image_reaches_the_backend(client, backend, red_circle: str):
    image = {"type": "input_image", "image_url": red_circle, "detail": "auto"}
    parts = [{"type": "input_text", "text": SHAPE_QUESTION}, image]
    assert respond(client, input=[{"role": "user", "content": parts}]).output_text == SHAPE
    [(request, route)] = backend.requests
    assert route is Route.MLLM and [image.url for image in image_sources(request.messages)] == [red_circle]


@STREAMED
def test_answer_at_the_token_limit_is_incomplete(client, streamed: bool):
    answer = client.responses.create(model=MODEL, input=CAPITAL_QUESTION, max_output_tokens=3, stream=streamed)
    *_, last = answer if streamed else [answer]
    response = last.response if streamed else last
    assert not streamed or last.type == "response.incomplete"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 3 and CAPITAL.startswith(response.output_text)


def test_an_unknown_model_and_an_unknown_response_are_not_found(client):
    import openai

    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-none", input="Hello!")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Hello!", previous_response_id="resp_none")
    assert "resp_none" in caught.value.message


def test_a_bad_field_is_named(client, backend):
    import openai

    tools: Any = [*TOOLS, {"type": "custom", "name": "a b"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hello!", tools=tools)
    assert (caught.value.param or "").startswith("tools[1]") and backend.asked == []


def test_error_in_the_middle_of_a_stream_is_raised_after_its_text(client, backend):
    import openai

    backend.failure = EngineFailed("The step failed.")
    kinds: list[str] = []
    with pytest.raises(openai.APIError, match="engine failed"):
        for event in client.responses.create(model=MODEL, input=CAPITAL_QUESTION, stream=True):
            kinds += [event.type]
    assert kinds.count("response.output_text.delta") == 2 and kinds[-1] == "response.failed"
