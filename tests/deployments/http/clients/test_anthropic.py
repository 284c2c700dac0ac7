"""The anthropic SDK on messages, count_tokens and models."""

import base64
from typing import Any

import pytest

from deployments.requests import Route, ToolChoice
from engine.errors import ContextLengthExceeded, EngineFailed, Unavailable
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
from tests.support.sdks.anthropic_messages import TOOLS, ask, blocks, calls_of, results, said, text_of, user

SDKS = ("anthropic",)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@STREAMED
def test_a_question_is_answered_with_usage(claude, backend, streamed: bool):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = ask(claude, [user(CAPITAL_QUESTION)], streamed, system=system, max_tokens=64_000)
    assert (text_of(message), message.stop_reason, message.role) == (CAPITAL, "end_turn", "assistant")
    assert (message.id, message.model) == (backend.asked[0].request_id, MODEL)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 5, 0)
    assert usage.output_tokens > 1
    assert backend.asked[0].messages[0] == {"role": "system", "content": "Be brief."}


def event_kinds(claude, question: str, **options: Any) -> list[str]:
    """Return the types of the events of a streamed answer, and for deltas those of the delta."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "messages": [user(question)], **options}
    events = [event for event in claude.messages.create(stream=True, **fields) if event.type != "ping"]
    return [getattr(getattr(event, "delta", None), "type", None) or event.type for event in events]


def test_events_of_thought_and_call_come_in_their_order(claude):
    kinds = event_kinds(claude, WEATHER_QUESTION, tools=TOOLS, thinking=THINKING)
    thought = ["thinking_delta"] * kinds.count("thinking_delta")
    arguments = ["input_json_delta"] * kinds.count("input_json_delta")
    assert len(thought) > 1 and len(arguments) > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *thought,
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        *arguments,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_events_of_a_text_come_in_their_order(claude):
    kinds = event_kinds(claude, CAPITAL_QUESTION)
    text = ["text_delta"] * kinds.count("text_delta")
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert len(text) > 1 and kinds == ["message_start", "content_block_start", *text, *ends]


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(claude, backend, streamed: bool):
    conversation = [user(WEATHER_QUESTION)]
    message = ask(claude, conversation, streamed, tools=TOOLS)
    assert message.stop_reason == "tool_use" and not text_of(message)
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, tools=TOOLS)
    assert (text_of(answer), answer.stop_reason) == (WEATHER, "end_turn")
    [tool] = backend.asked[1].tools
    assert (tool.name, tool.parameters["required"]) == (TOOL_NAME, ["city"])
    assert backend.asked[1].messages[-1]["content"] == WEATHER_RESULT


@STREAMED
def test_two_calls_of_one_message_have_ids_of_their_own(claude, streamed: bool):
    conversation = [user(TWO_CITIES_QUESTION)]
    message = ask(claude, conversation, streamed, tools=TOOLS)
    assert calls_of(message) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    assert len({block.id for block in blocks(message, "tool_use")}) == 2
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, tools=TOOLS)
    assert text_of(answer) == " ".join(WEATHER.replace("Paris", city) for city in TWO_CITIES)


@pytest.mark.parametrize(
    ("choice", "means", "streamed"),
    [
        ({"type": "any"}, ToolChoice("required"), False),
        ({"type": "tool", "name": TOOL_NAME}, ToolChoice("required", (TOOL_NAME,)), True),
    ],
    ids=["any", "tool"],
)
def test_a_forced_tool_is_called_even_for_a_greeting(claude, backend, choice: Any, means: ToolChoice, streamed: bool):
    message = ask(claude, [user("Hello!")], streamed, tools=TOOLS, tool_choice=choice)
    assert (calls_of(message), message.stop_reason) == ([(TOOL_NAME, {"city": "Paris"})], "tool_use")
    assert backend.asked[0].tool_choice == means


def test_tool_choice_limits_the_calls_to_one_or_none(claude, backend):
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(claude, [user(TWO_CITIES_QUESTION)], tools=TOOLS, tool_choice=one)
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]
    message = ask(claude, [user(WEATHER_QUESTION)], tools=TOOLS, tool_choice={"type": "none"})
    assert not calls_of(message) and text_of(message) and message.stop_reason == "end_turn"
    assert [request.tool_choice.mode for request in backend.asked] == ["auto", "none"]


def test_the_tool_runner_ends_with_an_answer(claude):
    from anthropic import beta_tool

    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather for a city"""
        asked.append(city)
        return WEATHER_RESULT

    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=[user(WEATHER_QUESTION)], tools=[get_weather]
    )
    assert text_of(runner.until_done()) == WEATHER and asked == ["Paris"]


@pytest.mark.parametrize(
    ("thinking", "streamed"), [(THINKING, True), ({"type": "adaptive"}, False)], ids=["enabled", "adaptive"]
)
def test_a_thought_is_a_signed_block_of_its_own(claude, thinking: Any, streamed: bool):
    message = ask(claude, [user(CAPITAL_QUESTION)], streamed, thinking=thinking, max_tokens=2000)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == CAPITAL_THOUGHT and message.content[0].signature
    assert text_of(message) == CAPITAL


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@STREAMED
def test_a_thought_comes_before_a_tool_call_and_goes_back_with_it(claude, backend, streamed: bool, display: str):
    thinking = {"type": "adaptive", "display": display}
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 2000, "thinking": thinking}
    conversation = [user(WEATHER_QUESTION)]
    message = ask(claude, conversation, streamed, **options)
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert message.content[0].thinking == ("" if display == "omitted" else WEATHER_THOUGHT)
    answer = ask(claude, [*conversation, said(message), results(message)], streamed, **options)
    assert text_of(answer) == WEATHER
    assert backend.asked[1].messages[1]["reasoning_content"] == WEATHER_THOUGHT


def test_a_parsed_message_is_an_object_of_the_schema(claude, backend):
    message = claude.messages.parse(model=MODEL, max_tokens=200, messages=[user(PERSON_QUESTION)], output_format=Person)
    assert message.parsed_output == EMMA and backend.asked[0].grammar.kind == "json_schema"


def test_image_reaches_the_backend_from_a_message_and_from_a_tool_result(
    claude, backend, red_circle: str, red_circle_png: bytes
):
    data = base64.b64encode(red_circle_png).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    assert text_of(ask(claude, [user([image, {"type": "text", "text": SHAPE_QUESTION}])])) == SHAPE
    call = {"type": "tool_use", "id": "toolu_1", "name": TOOL_NAME, "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    turns = [user(WEATHER_QUESTION), {"role": "assistant", "content": [call]}, user([result])]
    assert text_of(ask(claude, turns, tools=TOOLS)) == SHAPE
    for request, route in backend.requests:
        assert route is Route.MLLM and [image.url for image in image_sources(request.messages)] == [red_circle]


def test_a_stop_sequence_is_named(claude):
    message = ask(claude, [user(CAPITAL_QUESTION)], streamed=True, stop_sequences=["\n", " is"])
    assert (text_of(message), message.stop_reason) == ("The capital of France", "stop_sequence")
    assert message.stop_sequence == " is"


def test_answer_at_the_token_limit_ends_with_max_tokens(claude):
    message = ask(claude, [user(CAPITAL_QUESTION)], max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_count_tokens_counts_the_prompt_that_a_message_would_have(claude, backend):
    fields: dict[str, Any] = {"model": MODEL, "messages": [user(WEATHER_QUESTION)], "tools": TOOLS, "system": "Hi."}
    assert claude.messages.count_tokens(**fields).input_tokens == 11
    claude.messages.create(max_tokens=5, **fields)
    counted, asked = backend.asked
    assert (counted.messages, counted.tools) == (asked.messages, asked.tools)


def test_models_are_listed_in_anthropic_s_shape(claude):
    [model] = claude.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)


def test_an_unknown_model_is_not_found(claude):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude-none", max_tokens=5, messages=[user("Hello!")])
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert "claude-none" in body["error"]["message"] and body["request_id"] == caught.value.request_id


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards: Extra inputs are not permitted"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ],
    ids=["unknown", "path"],
)
def test_a_bad_field_is_named_in_anthropic_s_words(claude, backend, fields: Any, says: str):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=5, messages=[user("Hello!")], extra_body=fields)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error" and says in body["error"]["message"]
    assert backend.asked == []


def test_a_prompt_beyond_the_context_is_too_long(claude, backend):
    import anthropic

    backend.refusals.append(ContextLengthExceeded(40_000, 300, 32_768))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 40000 tokens > 32768 maximum"):
        ask(claude, [user("4 2 1")])


def test_a_thread_is_refused_with_the_code_that_the_sdk_knows(claude):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, [user("Hello!")], extra_body={"thread": {"type": "create"}})
    body: Any = caught.value.body
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(EngineFailed("The step failed."), "api_error"), (Unavailable("It is lost.", 5.0), "overloaded_error")],
    ids=["failed", "unavailable"],
)
def test_error_in_the_middle_of_a_stream_is_raised_after_its_text(claude, backend, failure: Exception, kind: str):
    import anthropic

    backend.failure = failure
    kinds: list[str] = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        for event in claude.messages.create(model=MODEL, max_tokens=50, messages=[user(CAPITAL_QUESTION)], stream=True):
            kinds += [event.type]
    body: Any = caught.value.body
    assert body["error"]["type"] == kind and kinds.count("content_block_delta") == 2
