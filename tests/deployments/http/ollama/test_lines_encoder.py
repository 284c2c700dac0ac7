"""Lines of a stream and whole answers, and the durations in them."""

import json

import pytest

from deployments.http.answer import Answer
from deployments.http.errors import Failure, ModelNotFound
from deployments.http.generation import TextDelta, TextLogprobs, ToolCall
from deployments.http.ollama.durations import answer_durations, load_durations
from deployments.http.ollama.generation_wire import GenerationEcho
from deployments.http.ollama.lines_encoder import ChatLines, GenerateLines
from deployments.http.timeline import RequestTimeline
from engine.timeline import Decoded, Prefilled, Queued, RowTimeline
from tests.deployments.http.conftest import FakeGeneration, parts_of
from tests.deployments.http.ollama.conftest import lines
from tests.support.clock import Clock

ECHO = GenerationEcho("demo:latest", logprobs=True)
CALLS = tuple(ToolCall(f"call_{i}", "find", json.dumps({"x": i, "e": "é"})) for i in range(2))
DELTAS = [
    TextDelta("", 2, reasoning="Let me", num_reasoning_tokens=2),
    TextDelta("", 1, reasoning=" see.", num_reasoning_tokens=1),
    TextDelta("Hello", 1, logprobs=(TextLogprobs(b"Hello", -0.5, ((b"Hello", -0.5), (b"\xc3", float("-inf")))),)),
    TextDelta("", 1),
    TextDelta(" you", 1),
    TextDelta("", 8, tool_calls=CALLS[:1]),
    TextDelta("", 8, tool_calls=CALLS[1:]),
    TextDelta("", 1, "tool_calls"),
]


def answer(deltas: list[TextDelta]) -> Answer:
    found = Answer(FakeGeneration([]), 1, keeps_text=True)
    for delta in deltas:
        found.add(delta)
    return found


def streamed(encoder: GenerateLines, deltas: list[TextDelta]) -> list[dict]:
    events = [encoder.opening(FakeGeneration([])), *map(encoder.encode, deltas), encoder.closing(answer(deltas))]
    return lines(b"".join(events))


def test_thought_text_and_calls_have_their_own_fields():
    *parts, end = streamed(ChatLines(ECHO), DELTAS)
    assert {part["model"] for part in parts} == {"demo:latest"} and not any(part["done"] for part in parts)
    assert all(part["created_at"].endswith("Z") and part["message"]["role"] == "assistant" for part in parts)
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Let me see."
    assert "".join(part["message"]["content"] for part in parts) == "Hello you"
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert calls == [
        {"id": f"call_{i}", "function": {"index": i, "name": "find", "arguments": {"x": i, "e": "é"}}} for i in range(2)
    ]
    assert end["message"] == {"role": "assistant", "content": ""} and end["done"] is True
    assert (end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == ("stop", 7, 23)


def test_a_whole_answer_has_what_its_stream_has():
    whole = ChatLines(ECHO).body(answer(DELTAS))
    assert whole["message"]["content"] == "Hello you" and whole["message"]["thinking"] == "Let me see."
    assert [call["function"]["index"] for call in whole["message"]["tool_calls"]] == [0, 1]
    assert whole["done"] is True and whole["eval_count"] == 23
    text = GenerateLines(ECHO).body(answer(DELTAS))
    assert (text["response"], text["thinking"]) == ("Hello you", "Let me see.") and "message" not in text
    parts = streamed(GenerateLines(ECHO), DELTAS)
    assert "".join(part["response"] for part in parts) == "Hello you"


def test_logprobs_have_the_text_and_bytes_of_each_token():
    for found in (ChatLines(ECHO).body(answer(DELTAS)), streamed(ChatLines(ECHO), DELTAS)[2]):
        assert found["logprobs"] == [
            {
                "token": "Hello",
                "logprob": -0.5,
                "bytes": list(b"Hello"),
                "top_logprobs": [
                    {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]},
                ],
            }
        ]
    assert "logprobs" not in ChatLines(GenerationEcho("demo")).body(answer(DELTAS))


def test_a_call_in_parts_comes_as_a_whole_and_one_that_is_cut_off_never():
    parts = [*parts_of(CALLS[0], 1, 7), *parts_of(CALLS[1], 3, is_cut_off=True)]
    deltas = [TextDelta("", 1, tool_calls=(part,)) for part in parts] + [TextDelta("", 0, "length")]
    sent = [line for line in streamed(ChatLines(ECHO), deltas) if line["message"].get("tool_calls")]
    whole = ChatLines(ECHO).body(answer(deltas))
    assert len(sent) == 1 and sent[0]["message"]["tool_calls"] == whole["message"]["tool_calls"]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"x": 0, "e": "é"}
    assert whole["done_reason"] == "length"


@pytest.mark.parametrize(("reason", "said"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")])
def test_an_answer_ends_for_one_of_two_reasons(reason: str, said: str):
    assert GenerateLines(ECHO).body(answer([TextDelta("a", 1, reason)]))["done_reason"] == said


def test_lines_that_keep_a_connection_open_have_no_output():
    for encoder, field in ((ChatLines(ECHO), "message"), (GenerateLines(ECHO), "response")):
        waiting, note = lines(encoder.waiting() + encoder.note("X-Orchard-Node", "n1"))
        assert waiting["done"] is note["done"] is False
        assert waiting[field] == note[field] and waiting[field] in ("", {"role": "assistant", "content": ""})
        assert note["x-orchard-node"] == "n1"


def test_an_error_is_the_last_line():
    failure = Failure(429, "256 requests are waiting.", "rate_limit_error", retry_after_s=2)
    assert lines(ChatLines(ECHO).failed(failure)) == [{"error": "256 requests are waiting.", "retry_after_s": 2}]
    missing = Failure(404, "m", "invalid_request_error", error=ModelNotFound("x", "demo"))
    assert lines(ChatLines(ECHO).failed(missing)) == [{"error": "model 'x' not found: this server serves 'demo'"}]


ROW = RowTimeline(
    index=0,
    phases=(Queued(seconds=1.0), Prefilled(seconds=2.0, num_tokens=7), Decoded(seconds=1.0, num_tokens=3)),
    seconds=4.0,
    first_token_s=3.0,
    last_token_s=4.0,
    num_prompt_tokens=7,
    num_cached=0,
    num_skipped=0,
    num_tokens=3,
    finish_reason="stop",
)


def test_durations_are_those_of_the_engines_phases():
    clock = Clock()
    timeline = RequestTimeline("req", "/api/chat", clock=clock)
    clock.advance(0.5)
    timeline.lap("body")
    clock.advance(4.0)
    timeline.lap("engine")
    timeline.add_row(ROW)
    clock.advance(0.25)
    assert answer_durations(timeline) == {
        "total_duration": 4_750_000_000,
        "load_duration": 1_500_000_000,
        "prompt_eval_duration": 2_000_000_000,
        "eval_duration": 1_000_000_000,
    }


def test_without_the_engines_phases_the_first_token_divides_the_time():
    clock = Clock()
    timeline = RequestTimeline("req", "/api/chat", clock=clock)
    clock.advance(0.5)
    timeline.lap("body")
    assert load_durations(timeline) == {"total_duration": 500_000_000, "load_duration": 500_000_000}
    clock.advance(1.5)
    timeline.first_token_s = timeline.spent_s
    clock.advance(1.0)
    assert answer_durations(timeline) == {
        "total_duration": 3_000_000_000,
        "load_duration": 500_000_000,
        "prompt_eval_duration": 1_500_000_000,
        "eval_duration": 1_000_000_000,
    }
