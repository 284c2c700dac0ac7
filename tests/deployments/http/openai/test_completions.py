"""POST /v1/completions: raw prompts of all shapes, their answers in the legacy body, streamed and whole."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from deployments.http.generation import PromptLogprobs, TextDelta, TextLogprobs
from deployments.http.openai.completions_encoder import LogprobsEncoder, token_name
from deployments.requests import Route
from engine.errors import EngineFailed, InvalidRequest, Overloaded
from tests.deployments.http.conftest import assert_refused

PATH = "/v1/completions"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 0, "drafted_tokens": 0, "accepted_draft_tokens": 0},
}
HELLO = (TextLogprobs(b"Hel", -0.5, ((b"Hel", -0.5), (b"\xf0\x9f", -2.0))), TextLogprobs(b"lo", float("-inf")))


@pytest.fixture
def complete(send) -> Callable[..., httpx.Response]:
    def post(app: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "prompt": "Once", **fields}
        return send("POST", PATH, app=app, content=json.dumps(body))

    return post


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_prompt_is_continued(complete, backend):
    body = complete().json()
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "org/demo",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    [(request, route)] = backend.requests
    assert (request.raw_prompt, request.messages, request.max_tokens, route) == ("Once", (), 16, Route.TEXT)


def test_stream_has_the_text_finish_reason_and_usage_of_the_whole_completion(complete):
    chunks = chunks_of(complete(stream=True, stream_options={"include_usage": True}))
    assert texts_of(chunks) == {0: "Hello"}
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None, "stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], USAGE)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    running = chunks_of(complete(stream=True, stream_options={"continuous_usage_stats": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in running] == [1, 4]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["Once"], ["Once"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts_of_all_shapes_reach_the_engine(complete, backend, prompt, expected):
    body = complete(prompt=prompt).json()
    assert [request.raw_prompt for request, _ in backend.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == 7 * len(expected)
    assert len({request.request_id for request, _ in backend.requests}) == len(expected)


def test_the_choices_of_several_prompts_are_numbered_prompt_by_prompt(complete, backend):
    backend.script = [TextDelta("x", 1, index=1), TextDelta("a", 1, "stop"), TextDelta("y", 1, "length", index=1)]
    body = complete(prompt=["p", "q"], n=2, best_of=2).json()
    got = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert got == [(0, "a", "stop"), (1, "xy", "length"), (2, "a", "stop"), (3, "xy", "length")]
    chunks = chunks_of(complete(prompt=["p", "q"], n=2, stream=True))
    assert texts_of(chunks) == {0: "a", 1: "xy", 2: "a", 3: "xy"}
    assert [generation.num_closed for generation in backend.generations] == [1] * 4


def test_choices_of_all_prompts_together_count_against_the_capacity(complete, backend):
    backend.capacity = 5
    refused = complete(prompt=["p", "q", "r"], n=2)
    assert refused.status_code == 429 and "6 more" in refused.json()["error"]["message"]
    assert complete(prompt=["p", "q"], n=2).status_code != 429


def test_echo_puts_the_prompt_in_front(complete):
    assert complete(echo=True).json()["choices"][0]["text"] == "OnceHello"
    assert complete(echo=True, prompt=[72, 105]).json()["choices"][0]["text"] == "HiHello"
    chunks = chunks_of(complete(echo=True, prompt=["a", "b"], stream=True))
    assert texts_of(chunks) == {0: "aHello", 1: "bHello"}
    assert complete(echo=False).json()["choices"][0]["text"] == "Hello"
    refused = complete(echo=True, prompt=[[72], [0x110000]])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")


WE = PromptLogprobs(b"W", (TextLogprobs(b"e", -1.5, ((b"a", -0.25),)),))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_gives_those_of_the_prompt_too(complete, backend, stream):
    backend.script = [TextDelta("Hello", 2, "stop", logprobs=HELLO[:1], prompt_logprobs=WE)]
    answer = complete(echo=True, logprobs=1, prompt="We", stream=stream)
    choices = [chunk["choices"][0] for chunk in chunks_of(answer)] if stream else answer.json()["choices"]
    [names, said, tops, offsets] = [
        [entry for choice in choices for entry in choice["logprobs"][field]]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    assert "".join(choice["text"] for choice in choices) == "WeHello"
    assert (names, said, offsets) == (["W", "e", "Hel"], [None, -1.5, -0.5], [0, 1, 2])
    assert tops[:2] == [None, {"a": -0.25, "e": -1.5}]
    request = backend.requests[0][0]
    assert (request.prompt_logprobs, request.logprobs, request.max_tokens) == (1, 1, 16)
    complete(logprobs=1)
    assert backend.requests[-1][0].prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_prompt_has_its_logprobs(complete, backend, stream):
    backend.script = [
        TextDelta("x", 1, "stop", logprobs=HELLO[:1], prompt_logprobs=WE),
        TextDelta("y", 1, "stop", index=1, logprobs=HELLO[:1]),
    ]
    answer = complete(echo=True, logprobs=0, prompt=["We", "We"], n=2, stream=stream)
    choices = (
        [choice for chunk in chunks_of(answer) for choice in chunk["choices"]] if stream else answer.json()["choices"]
    )
    for index, text in enumerate(["Wex", "Wey"] * 2):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [entry for choice in own for entry in choice["logprobs"]["token_logprobs"]] == [None, -1.5, -0.5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_with_echo_an_answer_may_have_no_tokens(complete, backend, stream, logprobs):
    prompt = None if logprobs is None else WE
    backend.script = [TextDelta("x", 1, "stop", logprobs=HELLO[:1] if logprobs else (), prompt_logprobs=prompt)]
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = complete(echo=True, max_tokens=0, prompt="We", logprobs=logprobs, **fields)
    bodies = chunks_of(answer) if stream else [answer.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert "".join(choice["text"] for choice in choices) == "We"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert bodies[-1]["usage"]["completion_tokens"] == 0
    said = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["token_logprobs"]]
    assert said == ([] if logprobs is None else [None, -1.5])


def test_logprobs_are_written_in_the_legacy_form(complete, backend):
    backend.script = [TextDelta("Hello", 2, "stop", logprobs=HELLO)]
    expected = {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"Hel": -0.5, "bytes:\\xf0\\x9f": -2.0}, {"lo": -9999.0}],
        "text_offset": [0, 3],
    }
    assert complete(logprobs=2).json()["choices"][0]["logprobs"] == expected
    assert chunks_of(complete(logprobs=2, stream=True))[0]["choices"][0]["logprobs"] == expected
    assert [request.logprobs for request, _ in backend.requests] == [2, 2]
    complete(logprobs=0)
    assert backend.requests[-1][0].logprobs == 0


def test_text_offsets_count_characters_even_when_tokens_split_a_character():
    text = "aé🙂b"
    pieces = [text.encode()[i : i + 1] for i in range(len(text.encode()))]
    encoder = LogprobsEncoder()
    offsets = [encoder.body([TextLogprobs(piece, -1.0)])["text_offset"][0] for piece in pieces]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3]
    assert LogprobsEncoder().body([TextLogprobs(piece, -1.0) for piece in pieces])["text_offset"] == offsets
    assert token_name(b"\xc3") == "bytes:\\xc3"


def test_sampling_fields_of_completions_mean_the_same_as_in_chat(complete, backend):
    fields = {"temperature": 0.5, "top_k": -1, "min_p": 0.1, "seed": -1, "stop": "\n", "logit_bias": {"5": 1}}
    complete(**fields, max_tokens=-1, user="u", guided_regex="a+b", min_tokens=0)
    complete(max_tokens=None, stop=["a", "b"], response_format={"type": "json_object"}, priority=3)
    (first, _), (second, _) = backend.requests
    assert (first.temperature, first.top_k, first.min_p, first.seed) == (0.5, 0, 0.1, 2**64 - 1)
    assert (first.max_tokens, first.stop, first.logit_bias, first.client) == (None, ("\n",), ((5, 1.0),), "u")
    assert first.grammar is not None and (first.grammar.kind, first.grammar.text) == ("regex", "a+b")
    assert (second.max_tokens, second.stop, second.priority) == (16, ("a", "b"), 3)
    assert second.grammar is not None and second.grammar.kind == "json_object"


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"prompt": []}, "prompt", ["at least 1"]),
        ({"prompt": None}, "prompt", ["array of strings"]),
        ({"prompt": [[]]}, "prompt[0]", ["at least 1"]),
        ({"prompt": [1, "a"]}, "prompt[1]", ['"a"', "an integer"]),
        ({"prompt": ["a", 1]}, "prompt[1]", ["1", "a string"]),
        ({"prompt": [True]}, "prompt", ["array of token ids"]),
        ({"prompt": [-1]}, "prompt[0]", ["-1"]),
        ({"prompt": ["a"] * 129}, "prompt", ["129", "128"]),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", ["130", "128"]),
        ({"max_tokens": 0}, "max_tokens", ["-1"]),
        ({"best_of": 2}, "best_of", ["2", "1"]),
        ({"n": 2, "best_of": 3}, "best_of", ["3", "2"]),
        ({"suffix": "x"}, "suffix", ['"x"', "not supported"]),
        ({"echo": False, "max_tokens": 0}, "max_tokens", ["echo"]),
        ({"echo": True, "max_tokens": 0, "min_tokens": 3}, "min_tokens", ["3", "0"]),
        ({"prompt_logprobs": 1}, "prompt_logprobs", ["echo", "logprobs"]),
        ({"logprobs": 6}, "logprobs", ["6", "5"]),
        ({"logprobs": True}, "logprobs", ["true"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", ["response_format"]),
        ({"tools": [{}]}, "tools", ["not supported"]),
        ({"messages": []}, "messages", ["/v1/chat/completions"]),
    ],
)
def test_invalid_or_unsupported_field_is_refused_by_name(complete, backend, fields, param, named):
    assert_refused(complete(**fields), backend, param, named)


def test_unknown_fields_are_reported_or_refused(complete, make_app):
    assert complete(keep_alive=5).headers["X-Orchard-Ignored"] == "keep_alive"
    refused = complete(app=make_app(unknown_fields="refuse"), keep_alive=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")
    assert complete(prompt="a", model="other").status_code == 404


def test_failure_of_a_prompt_ends_all_prompts_of_the_request(complete, backend):
    backend.script = [TextDelta("a", 1), EngineFailed("secret")]
    assert complete(prompt=["p", "q"]).status_code == 500
    assert [generation.num_closed for generation in backend.generations] == [1, 1]
    streamed = complete(prompt=["p", "q"], stream=True)
    *_, last, end = streamed.text.split("\n\n")
    assert '"error"' in last and end == "" and "secret" not in streamed.text


def test_failed_start_of_a_prompt_closes_the_generations_that_have_started(complete, backend):
    start = backend.start

    async def start_first(request, route):
        if request.raw_prompt == "q":
            await asyncio.sleep(0)
            raise InvalidRequest("too long", request.prompt_field)
        return await start(request, route)

    backend.start = start_first
    refused = complete(prompt=["p", "q", "r"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")
    assert [generation.num_closed for generation in backend.generations] == [1, 1]
    backend.start_script = [Overloaded("full", 3.0)]
    assert complete(prompt=["p", "r"]).headers["Retry-After"] == "3"


def test_a_completion_can_be_cancelled_by_its_request_id(make_app, backend):
    gate = asyncio.Event()
    backend.script = [TextDelta("a", 1), gate, TextDelta("b", 1, "stop")]

    async def talk() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": "org/demo", "prompt": ["p", "q"]}
            running = asyncio.ensure_future(client.post(PATH, json=body, headers={"X-Request-Id": "mine"}))
            async with asyncio.timeout(60):
                while len(backend.generations) < 2:
                    await asyncio.sleep(0)
                answer = await client.post(PATH + "/mine/cancel")
                assert answer.json() == {"id": "mine", "object": "text_completion.cancel", "cancelled": True}
                assert (await running).status_code == 499
            assert (await client.post(PATH + "/mine/cancel")).status_code == 404

    asyncio.run(talk())
    assert [generation.num_closed for generation in backend.generations] == [1, 1]


def test_the_openai_client_reads_completions(make_app, backend):
    backend.script = [TextDelta("Hello", 2, "stop", logprobs=HELLO)]

    async def talk() -> None:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://127.0.0.1")
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=http) as client:
            whole = await client.completions.create(model="org/demo", prompt=["a", "b"], logprobs=1)
            assert [choice.text for choice in whole.choices] == ["Hello", "Hello"]
            assert whole.choices[1].logprobs is not None and whole.choices[1].logprobs.tokens == ["Hel", "lo"]
            stream = await client.completions.create(model="org/demo", prompt="a", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"

    asyncio.run(talk())
