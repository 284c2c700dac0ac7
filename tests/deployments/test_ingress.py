"""From the engine's chunks to text, for one choice and for several, and on to the client over HTTP."""

import asyncio
import json
import math
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray import serve

from deployments import ingress
from deployments.args import AppArgs
from deployments.dispatch.text_generation import TextGeneration, answer_rules, left_open
from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from deployments.http.figures import HttpFigures
from deployments.http.generation import TextDelta
from deployments.http.in_flight import InFlight
from deployments.http.timeline import Timelines
from deployments.ingress import Ingress, all_engine_ids
from deployments.requests import ChatRequest, EngineAnswer, Route, SpecPrefillReport, Tool
from engine.cache_miss import CacheMiss
from engine.errors import Cancelled, EngineFailed, Unavailable
from engine.processing.answer_parser import AnswerRules
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import FinishReason, GrammarSpec, TokenChunk, TokenLogprobs
from engine.status import CacheCleared, CacheStatus

TOKENIZER = ChatTokenizer(DEMO_MODEL)
REPORT = SpecPrefillReport(6, 0.5)


class FakeStream:
    def __init__(self, chunks: list[TokenChunk], num_choices: int = 1):
        request = SimpleNamespace(token_ids=np.zeros(7), num_choices=num_choices, grammar=None)
        self.plan = SimpleNamespace(request=request, spec_prefill=REPORT)
        self.node_id = ""
        self.num_cached_tokens = 4
        self.num_skipped_tokens = 2
        self.num_read = 0
        self.is_closed = False
        self._chunks = chunks

    async def __aiter__(self) -> Any:
        for chunk in self._chunks:
            self.num_read += 1
            yield chunk

    async def aclose(self) -> None:
        self.is_closed = True


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode_text(text)]


def chunks_of(text: str, reason: FinishReason | None = FinishReason.STOP, **of_each: Any) -> list[TokenChunk]:
    """One token per chunk, then the end."""
    ended = TokenChunk((), reason, index=of_each.get("index", 0))
    return [TokenChunk((token,), **of_each) for token in ids_of(text)] + [ended]


def interleaved(*choices: list[TokenChunk]) -> list[TokenChunk]:
    return [chunk for step in zip_longest(*choices) for chunk in step if chunk is not None]


def deltas(stream: Any, stop: tuple[str, ...] = (), rules: AnswerRules | None = None) -> list[TextDelta]:
    async def go() -> list[TextDelta]:
        generation = TextGeneration(stream, TOKENIZER, rules or AnswerRules(stop))
        assert (generation.num_prompt_tokens, generation.num_cached_tokens) == (7, 4)
        assert (generation.num_skipped_tokens, generation.spec_prefill) == (2, REPORT)
        return [delta async for delta in generation]

    return asyncio.run(go())


def text_of(got: list[TextDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in got if delta.index == index)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_tokens_become_text_and_are_counted(reason: FinishReason):
    stream = FakeStream(chunks_of("Once upon a time", reason))
    got = deltas(stream)
    assert text_of(got) == "Once upon a time"
    assert sum(delta.num_tokens for delta in got) == len(ids_of("Once upon a time"))
    assert [delta.finish_reason for delta in got] == [None] * (len(got) - 1) + [reason.value]
    assert stream.is_closed


def test_markup_in_the_answer_to_a_raw_prompt_stays_text():
    text = "<think>\nHm.\n</think>\n\nYes <tool_call>"
    rules = answer_rules(ChatRequest("r", (), raw_prompt="x"), TOKENIZER, None)
    assert text_of(deltas(FakeStream(chunks_of(text)), rules=rules)) == text
    rendered = answer_rules(ChatRequest("r", ({"role": "user", "content": "x"},)), TOKENIZER, None)
    assert text_of(deltas(FakeStream(chunks_of(text)), rules=rendered)) == "Yes <tool_call>"


@pytest.mark.parametrize("field", ["tools", "response_format"])
def test_arguments_of_enforced_calls_come_in_parts_of_one_id_and_name(field: str):
    one = "<tool_call>\n<function=f>\n<parameter=s>\none two three\n</parameter>\n</function>\n</tool_call>"
    tool = Tool("f", None, {"type": "object", "properties": {"s": {"type": "string"}}})
    request = ChatRequest("r", ({"role": "user", "content": "x"},), tools=(tool,))
    rules = answer_rules(request, TOKENIZER, GrammarSpec("lark", "", field))
    got = deltas(FakeStream(chunks_of(f"{one}\n{one}")), rules=rules)
    parts = [call for delta in got for call in delta.tool_calls]
    assert (len(parts) > 6) == (field == "tools") and {part.name for part in parts} == {"f"}
    for id in dict.fromkeys(part.id for part in parts):
        own = [part for part in parts if part.id == id]
        assert "".join(part.arguments for part in own) == '{"s": "one two three"}'
        assert [part.is_first for part in own] == [True] + [False] * (len(own) - 1)
        assert [part.is_last for part in own] == [False] * (len(own) - 1) + [True]
    assert len({part.id for part in parts}) == 2 and got[-1].finish_reason == "tool_calls"


def test_a_stop_string_ends_the_engines_stream_at_once():
    stream = FakeStream(chunks_of("1, 2, 3, 4, 5, 6"))
    got = deltas(stream, (", 3",))
    assert text_of(got) == "1, 2"
    assert got[-1].finish_reason == "stop"
    assert sum(delta.num_tokens for delta in got) == stream.num_read < len(stream._chunks)
    assert stream.is_closed


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "error"),
    [
        (FinishReason.ERROR, None, EngineFailed("out of memory")),
        (FinishReason.ERROR, 7.0, Unavailable("out of memory", 7.0)),
        (FinishReason.ABORT, None, Cancelled("out of memory")),
    ],
)
@pytest.mark.parametrize("num_choices", [1, 2])
def test_choice_that_the_engine_ends_with_an_error_raises_and_closes_the_stream(
    reason: FinishReason, retry_after_s: float | None, error: Exception, num_choices: int
):
    failed = TokenChunk((), reason, "out of memory", index=num_choices - 1, retry_after_s=retry_after_s)
    stream = FakeStream([*chunks_of("Once")[:-1], failed], num_choices)
    with pytest.raises((EngineFailed, Cancelled)) as raised:
        deltas(stream)
    assert (type(raised.value), raised.value.args) == (type(error), error.args)
    assert stream.is_closed


def test_each_choice_has_its_own_detokenizer():
    texts = ["日本語 🙂 one", "🇩🇪 two 🙂", "three"]
    stream = FakeStream(interleaved(*(chunks_of(text, index=i) for i, text in enumerate(texts))), 3)
    got = deltas(stream)
    assert [text_of(got, i) for i in range(3)] == texts
    assert [sum(d.num_tokens for d in got if d.index == i) for i in range(3)] == [len(ids_of(t)) for t in texts]


def test_choice_ends_at_its_stop_string_while_other_choices_go_on():
    texts = ["1, 2, 3, 4, 5, 6, 7, 8, 9", "a, 3, b, c, d, e", "one and two and three and four and five and six"]
    stream = FakeStream(interleaved(*(chunks_of(text, index=i) for i, text in enumerate(texts))), 3)
    got = deltas(stream, (", 3",))
    assert [text_of(got, i) for i in range(3)] == ["1, 2", "a", texts[2]]
    ended = [(delta.index, delta.finish_reason) for delta in got if delta.finish_reason]
    assert ended == [(1, "stop"), (0, "stop"), (2, "stop")]
    alone = [deltas(FakeStream(chunks_of(text)), (", 3",)) for text in texts]
    for i in range(3):
        counted = sum(delta.num_tokens for delta in got if delta.index == i)
        assert counted == sum(delta.num_tokens for delta in alone[i])


def test_the_stream_is_closed_when_the_last_choice_reaches_its_stop_string():
    stream = FakeStream(interleaved(chunks_of("x STOP more", index=0), chunks_of("yyy y STOP more", index=1)), 2)
    got = deltas(stream, ("STOP",))
    assert [text_of(got, i) for i in range(2)] == ["x ", "yyy y "]
    assert stream.num_read < len(stream._chunks)
    assert stream.is_closed


def test_late_chunks_of_a_finished_choice_are_ignored():
    late = [TokenChunk((5, 6), num_drafted=9, num_accepted=9), TokenChunk((), FinishReason.ERROR, "late")]
    stream = FakeStream([*chunks_of("x STOP")[:-1], *late, *chunks_of("y", index=1)], 2)
    got = deltas(stream, ("STOP",))
    assert [text_of(got, i) for i in range(2)] == ["x ", "y"]
    assert sum(delta.num_drafted + delta.num_accepted for delta in got) == 0


def test_counts_of_drafted_and_accepted_tokens_are_passed_on():
    chunks = [TokenChunk(tuple(ids_of("one two")), num_drafted=3, num_accepted=2), TokenChunk((), FinishReason.STOP)]
    assert [(delta.num_drafted, delta.num_accepted) for delta in deltas(FakeStream(chunks))] == [(3, 2), (0, 0)]


def test_closed_generation_closes_the_stream_of_all_choices():
    stream: Any = FakeStream(interleaved(chunks_of("one two", index=0), chunks_of("three four", index=1)), 2)

    async def go() -> None:
        generation = TextGeneration(stream, TOKENIZER, AnswerRules())
        async for _ in generation:
            break
        await generation.aclose()

    asyncio.run(go())
    assert stream.is_closed


def with_logprobs(ids: list[int], reason: FinishReason | None = None, index: int = 0) -> TokenChunk:
    """The logprob of token t is -t, and token 7 is always the second best."""
    found = tuple(TokenLogprobs(-float(token), ((token, -float(token)), (7, -math.inf))) for token in ids)
    return TokenChunk(tuple(ids), reason, index=index, logprobs=found)


def test_logprobs_are_sent_with_their_tokens_even_when_the_text_is_withheld():
    ids = ids_of("🙂 EN") + ids_of("D")
    stream = FakeStream([with_logprobs([token]) for token in ids] + [TokenChunk((), FinishReason.LENGTH)])
    got = deltas(stream, ("ENDE",))
    assert [len(delta.logprobs) for delta in got] == [1] * len(ids) + [0]
    assert [delta.logprobs[0].logprob for delta in got[:-1]] == [-token for token in ids]
    assert got[0].text == "" and got[-1].text == "END"
    assert b"".join(delta.logprobs[0].token for delta in got[:-1]).decode() == "🙂 END"
    assert got[0].logprobs[0].top[1] == (TOKENIZER.token_bytes(7), -math.inf)


def test_tokens_behind_a_stop_string_have_no_logprobs():
    ids = ids_of("one STOP two three")
    (only,) = deltas(FakeStream([with_logprobs(ids)]), ("STOP",))
    assert (only.text, only.finish_reason) == ("one ", "stop")
    assert len(only.logprobs) == only.num_tokens < len(ids)
    assert b"".join(entry.token for entry in only.logprobs).endswith(b"STOP")


class EngineBackend:
    """chat.Backend over what an engine says, as Ingress is."""

    model_name = "demo"

    def __init__(self, chunks: list[TokenChunk]):
        self._chunks = chunks
        self.in_flight = InFlight(lambda: 128, max_choices=128)
        self.timelines = Timelines()
        self.figures = HttpFigures()
        self.max_context_tokens = 100

    async def start(self, request: ChatRequest, route: Route) -> TextGeneration:
        stream: Any = FakeStream(self._chunks, request.num_choices)
        return TextGeneration(stream, TOKENIZER, AnswerRules(request.stop))

    async def cancel(self, request_id: str) -> bool:
        return self.in_flight.cancel(request_id)

    async def status(self) -> dict[str, Any]:
        return {}

    async def cache_status(self) -> dict[str, Any]:
        return {}

    async def clear_cache(self) -> dict[str, Any]:
        return {}

    async def not_ready(self) -> str | None:
        return None

    async def not_started(self) -> str | None:
        return None


def post(chunks: list[TokenChunk], **fields: Any) -> httpx.Response:
    async def talk() -> httpx.Response:
        backend: Any = EngineBackend(chunks)
        transport = httpx.ASGITransport(create_app(backend, HttpConfig(), frozenset()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(talk())


Read = dict[int, tuple[str, list[int], list[float], str]]
"""index -> text, bytes of the logprobs' tokens, logprobs, finish reason."""


def read_whole(response: httpx.Response) -> tuple[Read, dict[str, Any]]:
    body = response.json()
    read = {}
    for choice in body["choices"]:
        entries = choice["logprobs"]["content"]
        bytes_ = [byte for entry in entries for byte in entry["bytes"]]
        logprobs = [entry["logprob"] for entry in entries]
        read[choice["index"]] = (choice["message"]["content"], bytes_, logprobs, choice["finish_reason"])
    return read, body["usage"]


def read_stream(response: httpx.Response) -> tuple[Read, dict[str, Any]]:
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    read: Read = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, bytes_, logprobs, finish_reason = read.get(choice["index"], ("", [], [], ""))
        assert finish_reason == "", "nothing comes after the end of a choice"
        entries = (choice["logprobs"] or {"content": []})["content"]
        read[choice["index"]] = (
            text + choice["delta"].get("content", ""),
            bytes_ + [byte for entry in entries for byte in entry["bytes"]],
            logprobs + [entry["logprob"] for entry in entries],
            choice["finish_reason"] or "",
        )
    return read, chunks[-1]["usage"]


texts = st.text(alphabet=st.sampled_from("ab nSTOP.,\té日本🙂🇩🇪ß"), max_size=20)


@settings(deadline=None, max_examples=60)
@given(
    answers=st.lists(st.tuples(texts, st.integers(1, 4)), min_size=1, max_size=4),
    stop=st.lists(st.text(alphabet="abnSTOP日", min_size=1, max_size=3), max_size=2),
    order=st.randoms(use_true_random=False),
)
@example([("one STOP two", 3), ("ab", 1)], ["STOP"], SimpleNamespace(choice=lambda seq: seq[0]))
def test_streamed_and_whole_answers_are_equal_and_their_token_counts_add_up(answers: Any, stop: list[str], order: Any):
    queues = [cut(ids_of(text), size, index) for index, (text, size) in enumerate(answers)]
    chunks = []
    while waiting := [queue for queue in queues if queue]:
        chunks.append(order.choice(waiting).pop(0))
    asked = {"n": len(answers), "stop": stop, "logprobs": True, "top_logprobs": 2}
    whole, usage = read_whole(post(chunks, **asked))
    assert read_stream(post(chunks, **asked, stream=True, stream_options={"include_usage": True})) == (whole, usage)
    assert usage["completion_tokens"] == sum(len(logprobs) for _, _, logprobs, _ in whole.values())
    for index, (text, bytes_, logprobs, finish_reason) in whole.items():
        answer = answers[index][0]
        assert logprobs == [-token for token in ids_of(answer)[: len(logprobs)]]
        assert bytes(bytes_).startswith(text.encode())
        stopped = any(s in answer for s in stop)
        assert finish_reason == ("stop" if stopped else "length")
        assert stopped or text == answer == bytes(bytes_).decode()


def cut(ids: list[int], size: int, index: int) -> list[TokenChunk]:
    """At most `size` tokens per chunk; the last one has tokens as well, if there are any."""
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
    ended = with_logprobs(pieces[-1], FinishReason.LENGTH, index)
    return [with_logprobs(piece, None, index) for piece in pieces[:-1]] + [ended]


def test_answer_has_no_logprobs_unless_requested():
    chunks = chunks_of("Once upon a time")
    assert post(chunks).json()["choices"][0]["logprobs"] is None
    assert '"logprobs": {' not in post(chunks, stream=True).text


@serve.deployment()
class CachingEngine:
    """A ModelReplica of which nothing is there but its cache."""

    def __init__(self) -> None:
        self._num_entries = 3

    async def cache_status(self) -> EngineAnswer[CacheStatus]:
        differs = CacheMiss(
            "r", "text", 40, 0, 12, "system", 38, tuple(ids_of(" blue")), tuple(ids_of(" red") + ids_of("<|im_end|>"))
        )
        return EngineAnswer("n", "e", CacheStatus(num_entries=self._num_entries, recent_misses=(differs,)))

    async def clear_cache(self) -> EngineAnswer[CacheCleared]:
        num_entries, self._num_entries = self._num_entries, 0
        return EngineAnswer("n", "e", CacheCleared(num_entries, 100))


@serve.deployment()
class SilentReplica:
    async def cache_status(self) -> None:
        raise EngineFailed("the engine is not ready: it is loading")


def ingress_before(engine: Any, scorer: Any = None) -> Any:
    """In Serve's local testing mode, without Ray."""
    graph = (engine.bind(), engine.bind(), engine.bind(), scorer)
    arguments = (AppArgs(), {}, *graph)
    return serve.run(Ingress.bind(*arguments), name=engine.name, _local_testing_mode=True)


def test_cache_status_shows_entries_and_token_text_and_clearing_removes_the_entries():
    deployed = ingress_before(CachingEngine)
    body = deployed.cache_status.remote().result(timeout_s=20)
    assert body["totals"]["entries"] == 3
    assert [(engine["node_id"], engine["replica_id"]) for engine in body["engines"]] == [("n", "e")]
    assert "' blue' instead of ' red<|im_end|>'" in body["engines"][0]["recent_misses"][0]["explanation"]
    assert body["missing"] == []
    assert deployed.clear_cache.remote().result(timeout_s=20)["cleared"] == {"entries": 3, "bytes": 100, "files": 0}
    assert deployed.cache_status.remote().result(timeout_s=20)["totals"]["entries"] == 0


@serve.deployment()
class Scorer:
    async def status(self) -> dict[str, Any]:
        return {"node_id": "n", "scorer": {"state": "unavailable"}}


@pytest.mark.parametrize(
    ("scorer", "shown"), [(None, None), (Scorer, [{"node_id": "n", "scorer": {"state": "unavailable"}}])]
)
def test_status_shows_the_scorers_or_null_without_a_configured_scorer(
    scorer: Any, shown: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ingress, "replica_info", dict)
    body = ingress_before(CachingEngine, scorer and scorer.bind()).status.remote().result(timeout_s=20)
    assert body["spec_prefill"] == shown


def test_engine_without_a_cache_status_is_listed_as_missing():
    body = ingress_before(SilentReplica).cache_status.remote().result(timeout_s=20)
    assert body["missing"] == [{"node_id": "", "engine_id": "", "reason": "the engine is not ready: it is loading"}]
    assert (body["engines"], body["totals"]["entries"]) == ([], 0)


def test_engines_have_the_ids_of_their_nodes_and_numbers_where_a_node_has_several(monkeypatch: pytest.MonkeyPatch):
    assert asyncio.run(all_engine_ids(1)) == [""]
    monkeypatch.setattr(ingress.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ingress, "engines_by_node", lambda here: {"a": 1, "b": here})
    assert asyncio.run(all_engine_ids(2)) == ["a", "b:0", "b:1"]


def test_the_grammar_of_a_custom_tool_that_is_not_enforced_is_named():
    grammar = GrammarSpec("regex", "[a-z]+", "tools[1].format")
    tools = (Tool("f"), Tool("patch", input_grammar=grammar))
    request = ChatRequest("r", ({"role": "user", "content": "Go."},), tools=tools)
    enforced = GrammarSpec("lark", "start: /a/", "tools", ("tools (f): $.properties.a.not",))
    assert left_open(request, None) == ("tools (patch): format",)
    assert left_open(request, enforced) == enforced.left_open
