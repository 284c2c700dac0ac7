"""The requests of a storm: every kind, how a reply is read strictly, and how the answer of each kind is
checked. All prompts and seeds come from small pools, so that the same request comes again."""

import http.client
import io
import json
import math
import random
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.world.draws import Draws
from tests.e2e.pictures import about, image_part, shape
from tests.support.sse import events

QUESTIONS = (
    "What is 12 + 30?",
    "What is the capital of France?",
    "List three fruits.",
    "How many legs does a spider have?",
    "Count from 1 to 9.",
)
ANIMALS = ("fox", "cat", "dog", "owl")
PERSONAS = ("You are Kira, a baker from Oakdale.", "Answer in upper case.", "Answer in one word.")
RULES = " ".join(["The blue square is to the left of the green circle."] * 8)
SHAPES = tuple((color, kind) for color in ("red", "green", "blue", "yellow") for kind in ("circle", "square"))
SEEDS = (1, 2, 3)
USERS = (None, "ann", "bob", "eve")
CITIES = ("Paris", "Rome")
PLATE = "[A-F]{3}-[0-9]{2}"
SPARSE_TOKENS = 1100
UNSEEN = ("stream", "stream_options", "user")
"""Fields that never change a token."""

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}


NO_REPLY = (AssertionError, http.client.HTTPException, ValueError, KeyError)
"""Errors of a response that is broken off, or that Orchard did not make."""


@dataclass(frozen=True)
class Said:
    """A whole answer, streamed or not; texts, reasons and logprobs by choice."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    logprobs: tuple[tuple[dict[str, Any], ...], ...]
    usage: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A whole response: what was said, or the error object of the body or of the stream's last event."""

    status: int
    headers: Mapping[str, str]
    said: Said | None
    error: dict[str, Any] | None


@dataclass(frozen=True)
class Ask:
    """kind: one of KINDS. check: raises AssertionError for an answer that is none to this body. repeats: equal bodies
    give equal texts.
    refused: status and `param` of the error that it must get."""

    body: dict[str, Any]
    kind: str = ""
    check: Callable[[Said], None] = lambda said: None
    repeats: bool = True
    refused: tuple[int, str | None] | None = None

    @property
    def num_choices(self) -> int:
        return self.body.get("n", 1)

    @property
    def streams(self) -> bool:
        return self.body.get("stream", False)

    @property
    def key(self) -> str:
        """A key of all fields that the tokens depend on."""
        return json.dumps({name: value for name, value in self.body.items() if name not in UNSEEN}, sort_keys=True)


class _Recorded:
    def __init__(self, raw: bytes):
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def read_reply(raw: bytes) -> Reply:
    """Raises one of NO_REPLY, also for a stream that ends neither with [DONE] nor with an error."""
    response = http.client.HTTPResponse(cast(socket.socket, _Recorded(raw)), method="POST")
    response.begin()
    body, headers = response.read(), {name.lower(): value for name, value in response.getheaders()}
    if not headers.get("content-type", "").startswith("text/event-stream"):
        value = json.loads(body)
        if response.status == 200:
            return Reply(200, headers, _said(value["choices"], value["usage"]), None)
        return Reply(response.status, headers, None, value["error"])
    found = [data for _, data in events([(0.0, body)])]
    assert found, "a stream without events"
    *chunks, last = found
    if last == b"[DONE]":
        return Reply(response.status, headers, _streamed([json.loads(chunk) for chunk in chunks]), None)
    error = json.loads(last).get("error")
    assert error is not None, f"the stream broke off after {last!r}"
    return Reply(response.status, headers, None, error)


def _streamed(chunks: list[dict[str, Any]]) -> Said:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert "error" not in chunk, f"the stream went on after {chunk}"
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {
                    "message": {"content": ""},
                    "logprobs": {"content": []},
                    "finish_reason": None,
                    "index": part["index"],
                },
            )
            assert choice["finish_reason"] is None, f"choice {part['index']} went on after its end"
            choice["message"]["content"] += part["delta"].get("content") or ""
            choice["logprobs"]["content"] += (part["logprobs"] or {}).get("content", [])
            choice["finish_reason"] = part["finish_reason"]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return _said([choices[index] for index in sorted(choices)], usage)


def _said(choices: list[dict[str, Any]], usage: dict[str, Any]) -> Said:
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return Said(
        tuple(choice["message"]["content"] for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        tuple(tuple((choice["logprobs"] or {}).get("content") or ()) for choice in choices),
        usage,
    )


def check_answer(ask: Ask, said: Said) -> None:
    """Check what holds for every answer, then what holds for its kind."""
    usage, num_choices = said.usage, ask.num_choices
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    assert len(said.texts) == num_choices
    assert set(said.reasons) <= {"stop", "length"}, said.reasons
    assert prompt > 0 and usage["total_tokens"] == prompt + completion, usage
    assert said.reasons.count("length") * ask.body["max_tokens"] <= completion, (said.reasons, usage)
    assert completion <= num_choices * ask.body["max_tokens"], usage
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < prompt, usage
    drafts = usage["completion_tokens_details"]
    assert 0 <= drafts["accepted_draft_tokens"] <= drafts["drafted_tokens"], usage
    if ask.body.get("logprobs"):
        assert sum(map(len, said.logprobs)) == completion, usage
    ask.check(said)


def make_ask(rng: random.Random) -> Ask:
    (kind,) = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])
    make, _ = KINDS[kind]
    return replace(make(rng), kind=kind)


def one_of_each(seed: int) -> list[Ask]:
    """Return a request of each kind, then every picture and every prompt that is scored: what is kept of them is there
    afterwards."""
    rng = random.Random(seed)
    asks = [replace(make(rng), kind=kind) for kind, (make, _) in KINDS.items()]
    asks += [_about_shape(rng, *each) for each in SHAPES]
    return asks + [_scored(rng, each) for each in SEEDS]


def _ask(rng: random.Random, messages: Any, **fields: Any) -> Ask:
    """fields: those of Ask, and of the body."""
    own = {name: fields.pop(name) for name in ("check", "repeats", "refused") if name in fields}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 32, **fields}
    if rng.random() < 0.5 and "stream" not in body:
        body["stream"] = True
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if (user := rng.choice(USERS)) is not None:
        body["user"] = user
    return Ask(body, **own)


def _story(rng: random.Random) -> str:
    return f"Tell me a story about a {rng.choice(ANIMALS)}."


def short(rng: random.Random) -> Ask:
    return _ask(rng, rng.choice(QUESTIONS))


def story(rng: random.Random) -> Ask:
    return _ask(rng, _story(rng), max_tokens=96, stream=True)


def sampled(rng: random.Random) -> Ask:
    return _ask(rng, _story(rng), temperature=1.0, top_p=0.9, seed=rng.choice(SEEDS))


def choices(rng: random.Random) -> Ask:
    return _ask(rng, _story(rng), temperature=1.3, seed=rng.choice(SEEDS), n=rng.randint(2, 4))


def penalties(rng: random.Random) -> Ask:
    shaped = rng.choice(({"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}))
    return _ask(rng, _story(rng), min_tokens=8, logit_bias={"40": 2}, **shaped)


def stopped(rng: random.Random) -> Ask:
    stop = rng.choice(((" the",), ("a", ".")))

    def check(said: Said) -> None:
        assert not any(string in text for string in stop for text in said.texts), said.texts

    return _ask(rng, _story(rng), stop=list(stop), n=rng.choice((1, 1, 3)), max_tokens=64, check=check)


def logprobs(rng: random.Random) -> Ask:
    def check(said: Said) -> None:
        spelled = bytes(byte for entry in said.logprobs[0] for byte in entry["bytes"])
        assert spelled.decode(errors="replace").startswith(said.texts[0])
        for entry in said.logprobs[0]:
            top = [other["logprob"] for other in entry["top_logprobs"]]
            assert len(top) == 3 and top == sorted(top, reverse=True)
            assert sum(map(math.exp, top)) < 1.001, top

    return _ask(rng, rng.choice(QUESTIONS), logprobs=True, top_logprobs=3, check=check)


def schema(rng: random.Random) -> Ask:
    def check(said: Said) -> None:
        for text in said.texts:
            value = json.loads(text)
            assert list(value) == ["city", "count"] and value["city"] in CITIES and value["count"] in range(100), text

    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    n = rng.choice((1, 1, 2))
    return _ask(rng, rng.choice(QUESTIONS), response_format=form, n=n, max_tokens=400, check=check)


def regex(rng: random.Random) -> Ask:
    def check(said: Said) -> None:
        assert re.fullmatch(PLATE, said.texts[0]), said.texts

    fields = {"structured_outputs": {"regex": PLATE}, "temperature": 1.0, "seed": rng.choice(SEEDS)}
    return _ask(rng, _story(rng), check=check, **fields)


def picture(rng: random.Random) -> Ask:
    return _about_shape(rng, *rng.choice(SHAPES))


def _about_shape(rng: random.Random, color: str, kind: str) -> Ask:
    def check(said: Said) -> None:
        assert f"{color} {kind}" in said.texts[0], said.texts

    return _ask(rng, about("What is in the image?", _picture(color, kind)), check=check)


@cache
def _picture(color: str, kind: str) -> dict[str, Any]:
    return image_part(shape(color, kind))


def shared_system(rng: random.Random) -> Ask:
    """A conversation behind a system part that others have as well; its turns differ."""
    messages = [{"role": "system", "content": f"{rng.choice(PERSONAS)} {RULES}"}]
    if rng.random() < 0.5:
        messages += [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello! How can I help?"}]
    return _ask(rng, [*messages, {"role": "user", "content": rng.choice(QUESTIONS)}])


def long(rng: random.Random) -> Ask:
    return _ask(rng, _needle(700, rng.choice(SEEDS)), specprefill=False, max_tokens=24)


def sparse(rng: random.Random) -> Ask:
    return _scored(rng, rng.choice(SEEDS))


def _scored(rng: random.Random, seed: int) -> Ask:
    """The scorer may be busy, and the answer of a sparse prompt depends on what was cached for its plan."""

    def check(said: Said) -> None:
        report = said.usage["prompt_tokens_details"]["specprefill"]
        assert (report["skipped_tokens"] > 0) == (report["dense_because"] is None), report

    asked = rng.choice(({}, {"specprefill": True}, {"specprefill": True, "specprefill_keep_pct": 0.5}))
    messages = _needle(SPARSE_TOKENS, seed)
    return _ask(rng, messages, cache_salt="sparse", repeats=False, check=check, max_tokens=24, **asked)


@cache
def needle_text(num_tokens: int, seed: int) -> str:
    """A fact in a text of about so many tokens and a question about it: texts are a tenth too short."""
    draws = Draws(seed)
    while len(messages := retrieval(draws, num_tokens, single=True).messages) > 2:
        pass  # the text is in the system part
    return messages[0]["content"]


def _needle(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": needle_text(num_tokens, seed)}]


def invalid(rng: random.Random) -> Ask:
    """Refused at the wire, by a planner or by the engine."""
    fields, refused = rng.choice(INVALID)
    others = {name: value for name, value in fields.items() if name != "messages"}
    return _ask(rng, fields.get("messages", "Hello!"), refused=refused, **others)


_BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

INVALID: tuple[tuple[dict[str, Any], tuple[int, str | None]], ...] = (
    ({"temperature": 3}, (400, "temperature")),
    ({"model": "other"}, (404, "model")),
    ({"tools": [{"type": "function"}]}, (400, "tools[0].function")),
    ({"n": 128}, (400, "n")),
    ({"min_tokens": 40000, "max_tokens": 40000}, (400, "messages")),
    ({"stop_token_ids": [4096]}, (400, "stop_token_ids[0]")),
    ({"structured_outputs": {"regex": "("}}, (400, "structured_outputs.regex")),
    ({"messages": about("What is it?", _BROKEN)}, (400, "messages[0].content[0].image_url.url")),
)

KINDS: dict[str, tuple[Callable[[random.Random], Ask], int]] = {
    "short": (short, 20),
    "story": (story, 10),
    "sampled": (sampled, 8),
    "choices": (choices, 6),
    "penalties": (penalties, 6),
    "stop": (stopped, 7),
    "logprobs": (logprobs, 6),
    "schema": (schema, 6),
    "regex": (regex, 6),
    "picture": (picture, 8),
    "shared system": (shared_system, 10),
    "long": (long, 2),
    "sparse": (sparse, 3),
    "invalid": (invalid, 7),
}
"""With weights."""
