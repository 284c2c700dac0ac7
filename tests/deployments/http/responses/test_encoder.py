"""Answers as responses, and as their events in the order that clients read."""

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type_unchecked
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deployments.http.answer import Answer
from deployments.http.errors import Failure
from deployments.http.generation import TextDelta, ToolCall
from deployments.http.responses.encoder import ResponsesEncoder
from deployments.http.responses.sealed import Unsealer
from engine.errors import ContextLengthExceeded, EngineFailed, Overloaded
from tests.deployments.http.conftest import FakeGeneration, parts_of
from tests.deployments.http.responses.conftest import events_of, parse

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = ToolCall("call_" + "0" * 24, "agents.wait", '{"ms": 1}')
PATCH = ToolCall("call_3", "patch", '{"input": "two \\"lines\\"\\nof}"}')
TOOLS = [
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "wait"}]},
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "custom", "name": "patch"},
]


def whole(text: str = "", reasoning: str = "", calls: tuple[ToolCall, ...] = (), finish: str = "stop") -> TextDelta:
    return TextDelta(text, 4, finish, reasoning=reasoning, tool_calls=calls, num_reasoning_tokens=1)


def encoder(**fields: Any) -> ResponsesEncoder:
    return ResponsesEncoder(parse(tools=TOOLS, **fields).echo, "resp_" + "a" * 32, "org/demo", 5)


def stream_of(deltas: list[TextDelta], **fields: Any) -> list[dict[str, Any]]:
    """The events, all of which the SDK's types and its reader of streams accept."""
    generation = FakeGeneration([])
    answer, writer = Answer(generation, 1, keeps_text=False), encoder(**fields)
    text = writer.opening(generation)
    for delta in deltas:
        answer.add(delta)
        text += writer.encode(delta)
    events = events_of((text + writer.closing(answer)).decode())
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        EVENT.validate_python(event)
        state.handle_event(construct_type_unchecked(value=event, type_=ResponseStreamEvent))  # type: ignore[arg-type]
    return events


def body_of(deltas: list[TextDelta], **fields: Any) -> dict[str, Any]:
    answer = Answer(FakeGeneration([]), 1, keeps_text=True)
    for delta in deltas:
        answer.add(delta)
    body = encoder(**fields).body(answer)
    Response.model_validate(body)
    return body


def untimed(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "completed_at": None}


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


BEGIN = ["created", "in_progress"]
TEXT = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]


def test_events_of_a_text_answer_come_in_the_order_of_the_api():
    events = stream_of([TextDelta("Hel", 1), TextDelta("", 1), whole("lo")])
    assert types(events) == [*BEGIN, *TEXT, "output_text.delta", *TEXT_END, "completed"]
    assert [event.get("delta") for event in events if "delta" in event] == ["Hel", "lo"]
    assert events[-1]["response"]["output"] == [
        {
            "id": f"msg_{'a' * 32}0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 1, "drafted_tokens": 0, "accepted_draft_tokens": 0},
        "total_tokens": 13,
    }


def test_thought_text_and_calls_are_items_of_their_own():
    weather = ToolCall("call_2", "weather", "{}")
    events = stream_of([TextDelta("", 1, reasoning="hm"), TextDelta("I wait.", 1), whole(calls=(CALL, weather))])
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    thought = ["output_item.added", "content_part.added", "reasoning_text.delta"]
    thought_end = ["reasoning_text.done", "content_part.done", "output_item.done"]
    assert types(events) == [*BEGIN, *thought, *thought_end, *TEXT, *TEXT_END, *call, *call, "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert done[0]["summary"] == []
    assert done[2] == {
        "id": f"fc_{'a' * 32}2",
        "type": "function_call",
        "status": "completed",
        "call_id": CALL.id,
        "namespace": "agents",
        "name": "wait",
        "arguments": '{"ms": 1}',
    }
    assert done[3]["name"] == "weather"
    assert "namespace" not in done[3]


def test_reasoning_is_sent_as_a_summary_when_a_summary_is_requested():
    events = stream_of([TextDelta("", 1, reasoning="hm"), whole("a")], reasoning={"summary": "auto"})
    assert types(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item


def test_reasoning_has_encrypted_content_only_when_it_is_requested():
    item = body_of([whole("a", reasoning="hm")], include=["reasoning.encrypted_content"])["output"][0]
    assert Unsealer().open(item["encrypted_content"]) == "hm"
    assert "encrypted_content" not in body_of([whole("a", reasoning="hm")])["output"][0]


@pytest.mark.parametrize(
    ("delta", "kind"),
    [(whole("Hel", finish="length"), "message"), (whole(reasoning="h", finish="length"), "reasoning")],
)
def test_an_answer_that_is_cut_off_is_incomplete(delta, kind):
    response = stream_of([delta])[-1]
    assert response["type"] == "response.incomplete"
    assert response["response"]["status"] == "incomplete"
    assert response["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["type"], item["status"]) for item in response["response"]["output"]] == [(kind, "incomplete")]


def test_an_empty_answer_has_an_empty_message():
    for deltas in [[whole()], [whole(reasoning="hm")]]:
        message = stream_of(deltas)[-1]["response"]["output"][-1]
        assert message["content"][0]["text"] == ""
    assert stream_of([whole(finish="length")])[-1]["response"]["output"] == []


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[TextDelta], TextDelta]:
    """An answer in pieces, and the same in one."""
    reasoning, text = draw(st.text(max_size=8)), draw(st.text(max_size=8))
    calls = (CALL, ToolCall("call_2", "weather", "{}"), PATCH)[: draw(st.integers(0, 3))]
    finish = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    deltas = [TextDelta("", 1, reasoning=piece) for piece in pieces(draw, reasoning)]
    deltas += [TextDelta(piece, 1) for piece in pieces(draw, text)]
    parts = [part for call in calls for part in parts_of(call, *draw(st.lists(st.integers(0, 9), max_size=3)))]
    deltas += [TextDelta("", 1, tool_calls=(part,)) for part in parts]
    joined = TextDelta(text, len(deltas) + 1, finish, reasoning=reasoning, tool_calls=calls)
    return [*deltas, TextDelta("", 1, finish)], joined


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None)
@given(answers())
def test_events_of_an_answer_add_up_to_the_whole_one_for_any_split(answer):
    deltas, joined = answer
    events = stream_of(deltas)
    assert untimed(events[-1]["response"]) == untimed(body_of([joined]))
    items: dict[int, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_item.done":
            items[event["output_index"]] = event["item"]
        if "delta" in event:
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    assert list(items.values()) == events[-1]["response"]["output"]
    for index, item in items.items():
        if item["type"] == "custom_tool_call":
            said = item["input"]
        else:
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == said


def test_the_response_repeats_the_settings_of_its_request():
    fields = {
        "instructions": "Be kind.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "metadata": {"team": "a"},
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "weather"},
        "prompt_cache_key": "k",
        "store": False,
        "user": "u",
    }
    texts = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    body = body_of([whole("a")], text=texts, reasoning={"effort": "low"}, **fields)
    assert {name: body[name] for name in fields} == fields
    assert body["text"] == {**texts, "verbosity": "medium"}
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["tools"] == TOOLS
    assert (body["object"], body["model"], body["created_at"]) == ("response", "org/demo", 5)
    assert (body["truncation"], body["service_tier"], body["background"]) == ("disabled", "default", False)


def test_failure_is_sent_as_a_failed_response_and_as_an_error_event():
    failure = Failure(429, "Full.", "rate_limit_error", None, "overloaded", 4)
    writer = encoder()
    text = writer.opening() + writer.encode(TextDelta("Hel", 1)) + writer.failed(failure)
    events = events_of(text.decode())
    assert types(events)[-2:] == ["failed", "error"]
    for event in events:
        EVENT.validate_python(event)
    response, error = events[-2]["response"], events[-1]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "rate_limit_exceeded", "message": "Full. Please try again in 4s."}
    assert response["output"][0]["status"] == "incomplete"
    assert (error["code"], error["message"]) == ("rate_limit_exceeded", "Full. Please try again in 4s.")
    assert error["error"]["type"] == "rate_limit_error"


def test_a_failure_before_the_first_token_begins_the_response():
    events = events_of(encoder().failed(Failure(500, "m", "server_error")).decode())
    assert types(events) == [*BEGIN, "failed", "error"]
    assert events[-1]["code"] == "server_error"


def test_streamed_response_over_http_has_the_events_in_order(respond):
    response = respond(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert types(events) == [*BEGIN, *TEXT, "output_text.delta", *TEXT_END, "completed"]


def test_a_stream_that_fails_ends_with_the_error(respond, backend):
    backend.script = [TextDelta("Hel", 1), EngineFailed("boom")]
    events = events_of(respond(stream=True).text)
    assert types(events)[-2:] == ["failed", "error"]
    assert "boom" not in events[-1]["message"]


def test_errors_before_the_first_token_have_their_http_status_and_error_code(respond, backend):
    backend.start_script = [Overloaded("Full.", 2.0)]
    response: httpx.Response = respond(stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    backend.start_script = [ContextLengthExceeded(10, 5, 12)]
    assert respond().json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("call", "border"), [(CALL, 5), (PATCH, 17), (CALL, 0)])
def test_a_call_that_is_cut_off_is_an_incomplete_item(call: ToolCall, border: int):
    parts = parts_of(call, border, is_cut_off=True)
    deltas = [TextDelta("", 1, tool_calls=(part,)) for part in parts] + [TextDelta("", 0, "length")]
    events = stream_of(deltas)
    [item] = events[-1]["response"]["output"]
    assert untimed(events[-1]["response"]) == untimed(body_of(deltas))
    assert events[-2]["item"] == item and item["status"] == "incomplete"
    said = item["input"] if call is PATCH else item["arguments"]
    assert said == ('two "' if call is PATCH else call.arguments[:border])
    assert "".join(event["delta"] for event in events if "delta" in event) == said
