"""Several choices, logprobs and usage: what a client reads, streamed and whole."""

import asyncio
import json
import math
from typing import Any

import httpx
import pytest

from deployments.http.generation import TextDelta, TextLogprobs
from deployments.requests import SpecPrefillReport
from engine.errors import EngineFailed

HELLO = (TextLogprobs(b"Hel", -0.5, ((b"Hel", -0.5), (b"\xf0\x9f", -2.0))), TextLogprobs(b"lo", -0.25))
TWO = [
    TextDelta("a", 1, index=1),
    TextDelta("x", 2, index=0, num_drafted=3, num_accepted=1),
    TextDelta("b", 1, "length", index=1, num_drafted=2, num_accepted=2),
    TextDelta("y", 1, index=0),
    TextDelta("", 0, "stop", index=0),
]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [choice for chunk in chunks_of(response) for choice in chunk["choices"]]


def test_choices_are_sorted_by_index_and_their_tokens_are_added_up(chat, backend):
    backend.script = TWO
    body = chat(n=2).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "xy", "stop"),
        (1, "ab", "length"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0, "drafted_tokens": 5, "accepted_draft_tokens": 3},
    }


@pytest.mark.parametrize("dense_because", [None, "deadline: no plan within 30 s"])
def test_usage_reports_the_sparse_prefill_of_streamed_and_whole_answers(chat, backend, dense_because):
    backend.spec_prefill = SpecPrefillReport(9000, 1.23456, dense_because)
    whole = chat().json()["usage"]
    assert whole["prompt_tokens_details"] == {
        "cached_tokens": 5,
        "specprefill": {
            "skipped_tokens": 3,
            "scored_tokens": 9000,
            "scoring_ms": 1234.6,
            "dense_because": dense_because,
        },
    }
    assert chunks_of(chat(stream=True, stream_options={"include_usage": True}))[-1]["usage"] == whole


def test_usage_has_no_sparse_prefill_entry_without_a_sparse_prefill_report(chat):
    assert chat().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_streamed_choices_are_interleaved_and_end_independently(chat, backend):
    backend.script = TWO
    response = chat(n=2, stream=True, stream_options={"include_usage": True})
    seen = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for c in choices_of(response)]
    assert seen == [
        (0, "", None),
        (1, "", None),
        (1, "a", None),
        (0, "x", None),
        (1, "b", None),
        (1, None, "length"),
        (0, "y", None),
        (0, None, "stop"),
    ]
    assert all(choice["delta"]["role"] == "assistant" for choice in choices_of(response)[:2])
    assert chunks_of(response)[-1]["usage"] == chat(n=2).json()["usage"]


def test_finished_choice_is_sent_while_another_choice_runs(connect, backend):
    async def talk() -> None:
        gate = asyncio.Event()
        backend.script = [*TWO[:3], gate, *TWO[3:]]
        connection = connect(n=2, stream=True)
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while b'"finish_reason": "length"' not in connection.body:
                await asyncio.sleep(0.001)
        assert b"[DONE]" not in connection.body
        gate.set()
        await task
        assert connection.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(talk())


@pytest.mark.parametrize("missing", [0, 1])
def test_a_generation_that_leaves_a_choice_unfinished_is_an_error(chat, backend, missing):
    backend.script = [delta for delta in TWO if delta.index != missing or delta.finish_reason is None]
    assert chat(n=2).status_code == 500
    stream = chat(n=2, stream=True).text
    assert '"code": "engine_failed"' in stream
    assert "[DONE]" not in stream


def test_an_error_after_one_choice_has_ended_ends_the_stream(chat, backend):
    backend.script = [*TWO[:3], EngineFailed("lost")]
    assert chat(n=2).status_code == 500
    events = chat(n=2, stream=True).text.split("\n\n")
    assert '"finish_reason": "length"' in events[-3]
    assert '"code": "engine_failed"' in events[-2]


@pytest.mark.parametrize("stream", [False, True])
def test_generation_is_closed_when_the_client_of_several_choices_disconnects(connect, backend, stream):
    async def talk() -> None:
        backend.script = [*TWO[:3], asyncio.Event()]
        connection = connect(n=2, stream=stream)
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while not backend.generations or (stream and b"length" not in connection.body):
                await asyncio.sleep(0.001)
        connection.left.set()
        async with asyncio.timeout(1):
            await task
        assert backend.generations[0].num_closed == 1
        assert b"[DONE]" not in connection.body

    asyncio.run(talk())


def token(text: str, logprob: float, bytes_: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(bytes_)}


HELLO_BODY = {
    "content": [
        {
            **token("Hel", -0.5, b"Hel"),
            "top_logprobs": [token("Hel", -0.5, b"Hel"), token("�", -2.0, b"\xf0\x9f")],
        },
        {**token("lo", -0.25, b"lo"), "top_logprobs": []},
    ],
    "refusal": None,
}


def test_logprobs_have_the_shape_of_openai(chat, backend):
    backend.script = [TextDelta("Hel", 1, logprobs=HELLO[:1]), TextDelta("lo", 1, "stop", logprobs=HELLO[1:])]
    assert chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"] == HELLO_BODY
    first, hel, lo, last = choices_of(chat(logprobs=True, top_logprobs=2, stream=True))
    assert (first["logprobs"], last["logprobs"]) == (None, None)
    assert [(c["delta"], c["logprobs"]["content"]) for c in (hel, lo)] == [
        ({"content": "Hel"}, HELLO_BODY["content"][:1]),
        ({"content": "lo"}, HELLO_BODY["content"][1:]),
    ]


def test_logprobs_are_sent_even_when_the_text_of_their_tokens_is_withheld(chat, backend):
    backend.script = [TextDelta("", 1, logprobs=HELLO[:1]), TextDelta("Hello", 1, logprobs=HELLO[1:])]
    backend.script += [TextDelta("!", 0, "stop")]
    _, held, hello, rest, last = choices_of(chat(logprobs=True, stream=True))
    assert [len(choice["logprobs"]["content"]) for choice in (held, hello)] == [1, 1]
    assert [choice["delta"] for choice in (held, hello, rest, last)] == [
        {"content": ""},
        {"content": "Hello"},
        {"content": "!"},
        {},
    ]
    assert (rest["logprobs"], last["finish_reason"]) == (None, "stop")


def test_an_answer_without_tokens_has_no_logprobs_but_an_empty_list(chat, backend):
    backend.script = [TextDelta("", 0, "stop")]
    assert chat(logprobs=True).json()["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert chat().json()["choices"][0]["logprobs"] is None


def test_infinite_logprobs_are_sent_as_minus_9999(chat, backend):
    impossible = TextLogprobs(b"x", -math.inf, ((b"y", -math.inf),))
    backend.script = [TextDelta("x", 1, "stop", logprobs=(impossible,))]
    (entry,) = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert "Infinity" not in chat(logprobs=True, stream=True).text
