import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.chat import TextDelta
from deployments.ingress import TextGeneration
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineFailed, FinishReason, TokenChunk


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO_MODEL)


class FakeStream:
    def __init__(self, chunks: list[TokenChunk]):
        self.plan = SimpleNamespace(request=SimpleNamespace(token_ids=np.zeros(7)))
        self.num_read = 0
        self.is_closed = False
        self._chunks = chunks

    async def __aiter__(self) -> Any:
        for chunk in self._chunks:
            self.num_read += 1
            yield chunk

    async def aclose(self) -> None:
        self.is_closed = True


def chunks_of(tokenizer: ChatTokenizer, text: str, last: TokenChunk) -> list[TokenChunk]:
    return [TokenChunk((int(token),)) for token in tokenizer.encode_text(text)] + [last]


def deltas(stream: Any, tokenizer: ChatTokenizer, stop: tuple[str, ...] = ()) -> list[TextDelta]:
    async def go() -> list[TextDelta]:
        generation = TextGeneration(stream, tokenizer.detokenizer(stop))
        assert generation.num_prompt_tokens == 7
        return [delta async for delta in generation]

    return asyncio.run(go())


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_tokens_become_text_and_are_counted(tokenizer: ChatTokenizer, reason: FinishReason):
    stream = FakeStream(chunks_of(tokenizer, "Once upon a time", TokenChunk((), reason)))
    got = deltas(stream, tokenizer)
    assert "".join(delta.text for delta in got) == "Once upon a time"
    assert sum(delta.num_tokens for delta in got) == len(tokenizer.encode_text("Once upon a time"))
    assert [delta.finish_reason for delta in got] == [None] * (len(got) - 1) + [reason.value]
    assert stream.is_closed


def test_a_stop_string_ends_the_engines_stream_at_once(tokenizer: ChatTokenizer):
    stream = FakeStream(chunks_of(tokenizer, "1, 2, 3, 4, 5, 6", TokenChunk((), FinishReason.STOP)))
    got = deltas(stream, tokenizer, (", 3",))
    assert "".join(delta.text for delta in got) == "1, 2"
    assert got[-1].finish_reason == "stop"
    assert sum(delta.num_tokens for delta in got) == stream.num_read < len(stream._chunks)
    assert stream.is_closed


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_what_the_engine_cannot_finish_is_an_error(tokenizer: ChatTokenizer, reason: FinishReason):
    stream = FakeStream(chunks_of(tokenizer, "Once", TokenChunk((), reason, "out of memory")))
    with pytest.raises(EngineFailed, match="out of memory"):
        deltas(stream, tokenizer)
    assert stream.is_closed
