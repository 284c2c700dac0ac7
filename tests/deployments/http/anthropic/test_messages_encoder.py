"""An answer as events in their exact order, and as a whole with the same content."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.answer import Answer
from deployments.http.anthropic.messages_encoder import MessagesEncoder
from deployments.http.anthropic.messages_wire import MessagesEcho
from deployments.http.anthropic.signature import omitted_thought
from deployments.http.errors import Failure
from deployments.http.generation import TextDelta, ToolCall
from deployments.requests import SpecPrefillReport
from tests.deployments.http.anthropic.conftest import events
from tests.deployments.http.conftest import FakeGeneration, parts_of

CALL = ToolCall("call_0123456789abcdef01234567", "find", '{"q": "é"}')
OTHER = ToolCall("call_0123456789abcdef01234568", "look", "{}")
HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "org/demo"}


def encoder(omits: bool = False) -> MessagesEncoder:
    return MessagesEncoder(MessagesEcho(omits), "msg_1", "org/demo", "req_1")


def answer_of(*deltas: TextDelta, context_limited: bool = False) -> Answer:
    generation = FakeGeneration([])
    generation.context_limited = context_limited
    answer = Answer(generation, 1, keeps_text=True)
    for delta in deltas:
        answer.add(delta)
    return answer


def streamed(*deltas: TextDelta, omits: bool = False) -> list[dict[str, Any]]:
    made = encoder(omits)
    stream = made.opening(FakeGeneration([])) + b"".join(map(made.encode, deltas)) + made.closing(answer_of(*deltas))
    return events(stream)


def whole(*deltas: TextDelta, omits: bool = False, context_limited: bool = False) -> dict[str, Any]:
    return encoder(omits).body(answer_of(*deltas, context_limited=context_limited))


def assembled(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client adds it up, every rule of the order checked on the way."""
    assert stream[0]["type"] == "message_start" and stream[-1]["type"] == "message_stop"
    assert stream[-2]["type"] == "message_delta"
    message = stream[0]["message"]
    content: list[dict[str, Any]] = message["content"]
    is_open, arguments = False, ""
    for event in stream[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append(dict(event["content_block"]))
                arguments, is_open = "", True
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                delta = {**event["delta"]}
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    [(name, more)] = delta.items()
                    content[-1][name] += more
            case _:
                assert event == {"type": "content_block_stop", "index": len(content) - 1} and is_open
                is_open = False
                if content[-1]["type"] == "tool_use":
                    assert content[-1]["input"] == {}
                    content[-1]["input"] = json.loads(arguments)
    assert not is_open
    return {**message, **stream[-2]["delta"], "usage": stream[-2]["usage"]}


def test_events_come_in_the_order_of_the_dialect():
    stream = streamed(
        TextDelta("", 1, reasoning="Hm"),
        TextDelta("", 1, reasoning="."),
        TextDelta("I ", 1),
        TextDelta("look.", 1),
        TextDelta("", 9, tool_calls=(CALL, OTHER)),
        TextDelta("", 0, "tool_calls"),
    )
    signature = stream[4]["delta"].pop("signature")
    assert signature
    usage = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5}
    start = {**HEAD, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    assert stream == [
        {"type": "message_start", "message": start},
        _start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        _delta(0, {"type": "thinking_delta", "thinking": "Hm"}),
        _delta(0, {"type": "thinking_delta", "thinking": "."}),
        _delta(0, {"type": "signature_delta"}),
        {"type": "content_block_stop", "index": 0},
        _start(1, {"type": "text", "text": ""}),
        _delta(1, {"type": "text_delta", "text": "I "}),
        _delta(1, {"type": "text_delta", "text": "look."}),
        {"type": "content_block_stop", "index": 1},
        _start(2, {"type": "tool_use", "id": "toolu_0123456789abcdef01234567", "name": "find", "input": {}}),
        _delta(2, {"type": "input_json_delta", "partial_json": '{"q": "é"}'}),
        {"type": "content_block_stop", "index": 2},
        _start(3, {"type": "tool_use", "id": "toolu_0123456789abcdef01234568", "name": "look", "input": {}}),
        _delta(3, {"type": "input_json_delta", "partial_json": "{}"}),
        {"type": "content_block_stop", "index": 3},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {**usage, "output_tokens": 13},
        },
        {"type": "message_stop"},
    ]


def _start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def test_whole_answer_is_a_message_with_text_stop_reason_and_usage():
    message = whole(TextDelta("Hel", 1), TextDelta("lo", 2, "stop"))
    assert message == {
        **HEAD,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("delta", "context_limited", "reason", "sequence"),
    [
        (TextDelta("a", 1, "stop"), True, "end_turn", None),
        (TextDelta("a", 1, "stop", stop_sequence="END"), False, "stop_sequence", "END"),
        (TextDelta("a", 1, "length"), False, "max_tokens", None),
        (TextDelta("a", 1, "length"), True, "model_context_window_exceeded", None),
        (TextDelta("", 1, "tool_calls", tool_calls=(CALL,)), False, "tool_use", None),
    ],
)
def test_stop_reason_and_stop_sequence_tell_how_the_answer_ended(delta, context_limited, reason, sequence):
    message = whole(delta, context_limited=context_limited)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_omitted_thinking_is_sent_only_in_its_signature():
    deltas = TextDelta("", 1, reasoning="Hm, "), TextDelta("", 1, reasoning="ü."), TextDelta("Yes.", 1, "stop")
    stream = streamed(*deltas, omits=True)
    assert "thinking_delta" not in [event.get("delta", {}).get("type") for event in stream]
    message = assembled(stream)
    assert message == whole(*deltas, omits=True)
    assert message["content"][0]["thinking"] == ""
    assert omitted_thought(message["content"][0]["signature"]) == "Hm, ü."


def test_empty_answer_has_no_content_blocks():
    assert whole(TextDelta("", 1, "stop"))["content"] == assembled(streamed(TextDelta("", 1, "stop")))["content"] == []


def test_tokens_of_the_thought_are_reported():
    deltas = TextDelta("", 3, reasoning="Hm.", num_reasoning_tokens=3), TextDelta("Yes.", 1, "stop")
    assert whole(*deltas)["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_usage_reports_the_sparse_prefill():
    answer = answer_of(TextDelta("a", 1, "stop"))
    answer.spec_prefill = SpecPrefillReport(4, 0.5)
    usage = encoder().body(answer)["usage"]
    assert usage["specprefill"]["scored_tokens"] == 4
    assert "cached_tokens" not in usage


def test_an_error_in_the_stream_is_an_event():
    failure = Failure(429, "256 requests are waiting.", "rate_limit_error", retry_after_s=2)
    assert events(encoder().failed(failure)) == [
        {
            "type": "error",
            "error": {"type": "rate_limit_error", "message": "256 requests are waiting.", "retry_after_s": 2},
            "request_id": "req_1",
        }
    ]


PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: TextDelta("", 1, reasoning=text), st.text(min_size=1, max_size=8)),
        st.builds(lambda text: TextDelta(text, 1), st.text(min_size=1, max_size=8)),
        st.just(TextDelta("", 1, tool_calls=(CALL,))),
    ),
    max_size=8,
)


def split(delta: TextDelta, places: list[int]) -> list[TextDelta]:
    """The same text, thought or call in several deltas."""
    if delta.tool_calls:
        return [TextDelta("", 0, tool_calls=(part,)) for part in parts_of(delta.tool_calls[0], *places)]
    whole = delta.text or delta.reasoning
    ends = sorted({place % (len(whole) + 1) for place in places} | {0, len(whole)})
    parts = [whole[start:end] for start, end in pairwise(ends)]
    return [TextDelta(part, 0) if delta.text else TextDelta("", 0, reasoning=part) for part in parts]


@given(PIECES, st.lists(st.integers(0, 8), max_size=3), st.booleans())
def test_events_add_up_to_the_whole_answer_for_any_split(deltas, places, omits):
    finer = [part for delta in deltas for part in split(delta, places)]
    end = TextDelta("", 0, "stop")
    message = whole(*deltas, end, omits=omits)
    assert assembled(streamed(*deltas, end, omits=omits)) == message
    streamed_finer = assembled(streamed(*finer, end, omits=omits))
    assert streamed_finer["content"] == whole(*finer, end, omits=omits)["content"] == message["content"]


def test_a_call_that_is_cut_off_stays_as_far_as_it_came():
    call = ToolCall("call_1", "write", '{"path": "a.py", "text": "one\\ntwo"}')
    for border, arguments in ((31, {"path": "a.py", "text": "one\n"}), (10, {"path": ""}), (1, {})):
        deltas = [
            TextDelta("", 3, tool_calls=tuple(parts_of(call, border, is_cut_off=True))),
            TextDelta("", 0, "length"),
        ]
        message = whole(*deltas)
        assert (message["content"][0]["input"], message["stop_reason"]) == (arguments, "max_tokens")
        sent = [
            event["delta"]["partial_json"] for event in streamed(*deltas) if "partial_json" in event.get("delta", {})
        ]
        assert "".join(sent) == call.arguments[:border]
        assert streamed(*deltas)[-3] == {"type": "content_block_stop", "index": 0}


def test_a_call_that_is_cut_off_in_what_no_text_may_hold_has_no_input():
    parts = parts_of(ToolCall("call_1", "write", '{"x": "\\ud83d and more"}'), 14, is_cut_off=True)
    assert whole(TextDelta("", 3, "length", tool_calls=tuple(parts)))["content"][0]["input"] == {}
