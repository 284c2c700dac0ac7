"""Embeddings out of the engine: the same alone, among others, in chunks and at once; and what they never do."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, Pooling
from engine.errors import ContextLengthExceeded, InvalidRequest, MemoryExceeded
from engine.protocol import EngineRequest, FinishReason, SamplingParams, SparsePlan, TokenChunk
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, run_engine

TOLERANCE = 2e-6
"""Tolerance of a vector of length 1 in float32: chunks round differently from the whole."""


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Not closed: that would take the streams of this thread from the runners of other tests."""
    config = EngineConfig(model=str(tiny_model(layers=2, interval=2)), device="cpu", dtype="float32")
    return load_runner(config, lambda progress: None)


def embedding_of(request_id: str, num_tokens: int, pooling: Pooling = "last") -> EngineRequest:
    rng = np.random.default_rng(num_tokens)
    ids = rng.integers(20, 500, num_tokens).astype(np.int32)
    return EngineRequest(request_id, ids, SamplingParams(1), (), pooling=pooling)


def story(request_id: str = "story", num_tokens: int = 40) -> EngineRequest:
    return EngineRequest(request_id, np.arange(30, 50, dtype=np.int32), SamplingParams(num_tokens, 0.0), ())


def vector(chunks: list[TokenChunk]) -> np.ndarray:
    [chunk] = chunks
    assert chunk.finish_reason is FinishReason.STOP and chunk.embedding is not None and not chunk.token_ids
    return np.frombuffer(chunk.embedding, "<f4")


def reference(runner: MLXRunner, request: EngineRequest) -> np.ndarray:
    """All of the prompt in one forward, without a cache."""
    ids = mx.array(request.token_ids[None])
    positions = np.broadcast_to(np.arange(len(request.token_ids), dtype=np.int32), (3, 1, len(request.token_ids)))
    hidden = np.array(runner._language_model.states(ids, runner._language_model.make_cache(), positions)[0], np.float64)
    pooled = hidden[-1] if request.pooling == "last" else hidden.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_same_alone_in_chunks_in_a_batch_and_while_a_row_decodes(tiny, pooling):
    requests = [embedding_of(f"e{n}", n, pooling) for n in (1, 16, 17, 90)]
    expected = {request.request_id: reference(tiny, request) for request in requests}
    small = EngineConfig(prefill_chunk_tokens=32, prefill_chunk_tokens_busy=16)
    alone_story = Driver(tiny).run({0: [story()]})["story"]
    for config in (EngineConfig(), small):
        for arrivals in ({0: requests}, {0: [story()], 3: requests}):
            driver = Driver(tiny, config)
            tokens = driver.run(arrivals)
            for name, known in expected.items():
                np.testing.assert_allclose(vector(driver.chunks[name]), known, atol=TOLERANCE)
            assert tokens.get("story", alone_story) == alone_story


def test_an_embedding_is_the_hidden_state_that_gives_the_logits(tiny):
    request = embedding_of("e", 12)
    hidden = mx.array(reference(tiny, request).astype(np.float32))
    logits = tiny._language_model.logits(hidden[None, None])
    first = EngineRequest("r", request.token_ids, SamplingParams(1, 0.0), ())
    assert Driver(tiny).run({0: [first]})["r"] == [int(np.array(logits).argmax())]


def test_decoding_rows_go_on_between_the_chunks_of_an_embedding(tiny):
    config = EngineConfig(prefill_chunk_tokens=32, prefill_chunk_tokens_busy=16)
    driver = Driver(tiny, config)
    driver.core.add_request(story(num_tokens=200))
    for _ in range(4):
        driver.core.step()
    driver.core.add_request(embedding_of("e", 160))
    num_before = len(driver.tokens["story"])
    while "e" not in driver.finish:
        driver.core.step()
    assert len(driver.tokens["story"]) - num_before >= 160 // 16 - 1


def test_an_embedding_leaves_no_memory_and_no_snapshot_behind(tiny):
    driver = Driver(tiny)
    driver.run({0: [embedding_of("a", 90), embedding_of("b", 90, "mean")], 1: [embedding_of("a again", 90)]})
    assert driver.core.prefixes.status().num_entries == 0
    assert driver.core.budget.status()["row_bytes"] == 0
    assert tiny.memory()["prefill_cache_bytes"] == 0
    assert driver.core.stats.num_finished == 3


def test_an_embedding_after_an_aborted_prompt_is_correct(tiny):
    driver = Driver(tiny, EngineConfig(prefill_chunk_tokens=32))
    ids = embedding_of("x", 400).token_ids
    driver.core.add_request(EngineRequest("gone", ids, SamplingParams(4), ()))
    driver.core.step()
    driver.core.add_request(embedding_of("e", 90))
    driver.core.abort("gone")
    driver.run({0: []})
    np.testing.assert_allclose(vector(driver.chunks["e"]), reference(tiny, embedding_of("e", 90)), atol=TOLERANCE)


def test_a_text_model_gives_embeddings_too(text_runner):
    driver = Driver(text_runner, EngineConfig(prefill_chunk_tokens=16))
    driver.run({0: [embedding_of("e", 50)]})
    known = reference(text_runner, embedding_of("e", 50))
    np.testing.assert_allclose(vector(driver.chunks["e"]), known, atol=TOLERANCE)


def test_hidden_states_that_are_not_finite_are_an_error_of_that_request_alone(tiny, monkeypatch):
    monkeypatch.setattr("engine.worker.pooling.PooledStates.vector", lambda self: None)
    driver = Driver(tiny)
    driver.run({0: [embedding_of("e", 20), story()]})
    assert driver.finish == {"e": FinishReason.ERROR, "story": FinishReason.LENGTH}
    assert driver.errors["e"] == "the hidden states contain NaN or inf"


def test_embeddings_that_cannot_be_made_are_refused_by_field():
    runner = FakeRunner()
    runner.max_context_tokens = 100

    def refused(request: EngineRequest, error: type[InvalidRequest], match: str) -> None:
        async def test(engine: AsyncEngine) -> None:
            with pytest.raises(error, match=match):
                await anext(engine.generate(request))

        run_engine(test, runner, {})

    def asking(num_tokens: int, **more: object) -> EngineRequest:
        request = embedding_of("e", num_tokens)
        return EngineRequest("e", request.token_ids, SamplingParams(1), (), pooling="last", **more)  # type: ignore[arg-type]

    plan = SparsePlan(np.arange(9, 50, dtype=np.int32), 0, "")
    refused(asking(101), ContextLengthExceeded, "101 in the prompt and 0 for the answer")
    refused(asking(50, num_choices=2), InvalidRequest, "n must not be set")
    refused(asking(50, sparse=plan), InvalidRequest, "prefill plan")
    runner.no_pooling = "it has no layers"
    refused(asking(50), InvalidRequest, "cannot compute embeddings: it has no layers")


def test_an_embedding_may_fill_the_whole_context(tiny_model):
    async def go() -> None:
        model = str(tiny_model(layers=2, interval=2))
        engine = AsyncEngine(EngineConfig(model=model, device="cpu", dtype="float32", max_context_tokens=64))
        await engine.wait_ready()
        try:
            [chunk] = [chunk async for chunk in engine.generate(embedding_of("e", 64))]
            assert chunk.embedding is not None and len(chunk.embedding) == 4 * 64
            with pytest.raises(ContextLengthExceeded):
                await anext(engine.generate(embedding_of("f", 65)))
        finally:
            await engine.shutdown()

    asyncio.run(go())


def test_an_embedding_that_does_not_fit_in_memory_is_refused(tiny):
    core = Driver(tiny).core
    core.budget.needs.limit_bytes = core.budget.costs.base_bytes + 1
    with pytest.raises(MemoryExceeded):
        core.budget.needs.clamp_max_tokens(embedding_of("e", 64), core.figures.pinned_bytes)
