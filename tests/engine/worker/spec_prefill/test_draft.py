"""The draft's reading of its own layers, against the model's own forward."""

import copy

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.errors import EngineFailed
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.kv_cache import num_bytes
from engine.worker.spec_prefill import attention, draft
from engine.worker.spec_prefill.draft import Draft, draft_engine_config
from tests.engine.worker.spec_prefill.drafts import FAMILIES, brute_force, greedy, load, make, prompt

STEPS = 3
RTOL = 1e-4
"""Relative tolerance of means over steps whose queries are compared with the keys in one product or in many."""


def look(draft: Draft, ids: np.ndarray, num_steps: int = STEPS, chunk: int = 32) -> tuple[np.ndarray, list[int]]:
    """Scores of each step and the tokens said, as the scorer does it."""
    cache, last = draft.make_cache(), len(ids) - 1
    for start in range(0, last, chunk):
        draft.extend(ids[start : min(start + chunk, last)], start, cache, len(ids) + num_steps)
    steps, said = [], [mx.array(ids[None, -1:])]
    for _ in range(num_steps):
        token_id, before = draft.look_ahead(said[-1], cache)
        steps.append(before)
        said.append(token_id)
    scores = [draft.observe([before], last + i, cache, len(ids)) for i, before in enumerate(steps)]
    np.testing.assert_allclose(
        draft.observe(steps, last, cache, len(ids)), np.mean(scores, axis=0), rtol=RTOL, atol=1e-8
    )
    return np.array(scores), [int(np.array(token_id).item()) for token_id in said[1:]]


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-4, atol=1e-4).item())


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_the_walk_gives_the_models_own_logits_and_layers_that_can_be_computed_again(draft_of, family):
    draft, ids = draft_of(family), prompt(70)
    walked, own = draft.make_cache(), draft.make_cache()
    for cache in (walked, own):
        draft.extend(ids[:-1], 0, cache, len(ids))
    logits, seen = draft.walk(mx.array(ids[None, -1:]), walked)
    assert close(logits, draft._forward(ids[-1:], 69, own))
    assert len(seen) == {"demo": 4, "hybrid": 2}.get(family, 3)
    for one in seen:
        assert close(one.layer.output(one.before, 69, one.cache), one.behind)
        gate = one.layer.query(one.before, 69, one.cache.keys.shape[-1])[1]
        assert (gate is not None) == (family == "hybrid")


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_importance_equals_that_from_all_scores_of_one_full_forward(draft_of, family, monkeypatch):
    draft, ids = draft_of(family), prompt(100, seed=1)
    scores, _ = look(draft, ids)
    expected = brute_force(draft, ids, STEPS, monkeypatch)
    np.testing.assert_allclose(scores.mean(axis=0), expected, rtol=1e-3, atol=1e-6)
    assert expected.max() > 1.3 * expected.min(), "the scores say something"


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_the_look_ahead_tokens_are_those_of_plain_greedy_decoding(draft_of, family):
    ids = prompt(50, seed=2)
    assert look(draft_of(family), ids, 6)[1] == greedy(draft_of(family), ids, 6)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 13, 40])
def test_scores_are_averaged_over_the_existing_neighbours(num_tokens):
    weights = np.random.default_rng(0).random((3, num_tokens), np.float32)
    expected = [weights[:, max(i - 6, 0) : i + 7].mean(axis=1) for i in range(num_tokens)]
    np.testing.assert_allclose(attention.pooled(mx.array(weights)), np.transpose(expected), rtol=1e-5)


def test_keys_in_pieces_give_the_same_scores(draft_of, monkeypatch):
    whole, _ = look(draft_of("qwen3"), prompt(60))
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", 7)
    pieces, _ = look(draft_of("qwen3"), prompt(60))
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "family, dtype", [(family, "bfloat16") for family in ("demo", *FAMILIES)] + [("qwen3", "float16")]
)
def test_scores_in_low_precision_are_nearly_those_in_float32(checkpoint, draft_of, family, dtype):
    low = load("demo" if family == "demo" else checkpoint(family), dtype=dtype)
    scores, _ = look(low, prompt(60), 1)
    expected, _ = look(draft_of(family), prompt(60), 1)
    assert scores.dtype == np.float32
    assert np.corrcoef(scores[0], expected[0])[0, 1] > 0.98


def test_a_compiled_block_gives_the_same_scores(draft_of):
    draft, ids = draft_of("hybrid"), prompt(60, seed=3)
    plain, _ = look(draft, ids)
    compiled = copy.copy(draft)
    compiled.compile_blocks(True)
    found, _ = look(compiled, ids)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-7)
    assert look(compiled, ids[:1])[1] == look(draft, ids[:1])[1], "without a state to begin with"


@pytest.mark.parametrize("family", ["demo", "hybrid"])
def test_a_draft_cache_takes_the_predicted_number_of_bytes(draft_of, family):
    draft, ids = draft_of(family), prompt(600)
    cache = draft.make_cache()
    for start in range(0, 600, 200):
        draft.extend(ids[start : start + 200], start, cache, 700)
        assert num_bytes(cache) == draft.cache_bytes(700)


def test_the_stop_tokens_of_the_draft_are_read_from_its_own_files(draft_of):
    assert draft_of("demo").stop_token_ids == {0, 2} and draft_of("qwen3").stop_token_ids == {1}
    assert draft_of("qwen3_vl").stop_token_ids == {1}


def test_chunks_on_the_cpu_shrink_where_the_scores_would_take_too_much(draft_of, monkeypatch):
    demo = draft_of("demo")
    assert demo.chunk_tokens(0, 1024) == demo.chunk_tokens(8192, 1024) == 1024
    monkeypatch.setattr(draft, "MAX_SCORES_BYTES", 4 * 4 * 1000 * 100)
    assert demo.chunk_tokens(900, 100) == 100 and demo.chunk_tokens(1900, 100) == 50
    assert demo.chunk_tokens(10**6, 1024) == 16


def test_chunks_on_a_gpu_shrink_only_for_heads_whose_scores_it_stores(draft_of, tmp_path, monkeypatch):
    fused, wide = draft_of("qwen3"), load(make(tmp_path / "wide", "qwen3", head_dim=256))
    monkeypatch.setattr(draft.devices, "on_gpu", lambda: True)
    assert fused.chunk_tokens(196_000, 2048) == wide.chunk_tokens(8192, 2048) == 2048
    monkeypatch.setattr(draft, "MAX_GPU_SCORES_BYTES", 4 * 4 * 1000 * 100)
    assert fused.chunk_tokens(900, 100) == 100 and wide.chunk_tokens(1900, 100) == 50


def test_memory_beside_the_cache_grows_by_less_than_the_cache_itself(draft_of, monkeypatch):
    one = draft_of("hybrid")
    monkeypatch.setattr(draft, "MAX_SCORES_BYTES", 2**20)
    monkeypatch.setattr(draft, "MAX_OBSERVED_BYTES", 2**20)

    def transient_bytes(num_tokens: int) -> int:
        cache, ids, last, done = one.make_cache(), prompt(num_tokens), num_tokens - 1, 0
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        while done < last:
            end = min(done + one.chunk_tokens(done, 256), last)
            one.extend(ids[done:end], done, cache, num_tokens + STEPS)
            done = end
        states = [one.look_ahead(mx.array(ids[None, -1:]), cache)[1] for _ in range(STEPS)]
        mx.eval(one.observe(states, last, cache, num_tokens))
        return mx.get_peak_memory() - before - one.cache_bytes(num_tokens + STEPS)

    # A kernel may copy one layer's keys and values, but stores no scores of all tokens.
    assert transient_bytes(4000) - transient_bytes(1000) < 3000 * one.bytes_per_token


def test_demo_is_the_demo_models_draft_without_its_head_in_the_requested_dtype():
    config = draft_engine_config(SpecPrefillConfig(dtype="bfloat16", mlx_cache_mb=7), "cpu")
    assert config.model.endswith("demo_model/draft") and config.mtp == "off"
    assert (config.dtype, config.device, config.mlx_cache_mb) == ("bfloat16", "cpu", 7)


UNREADABLE = {
    "a window": ("llama", {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}),
    "one projection": ("phi3", {}),
    "scaled embeddings": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16.0}),
}


@pytest.mark.parametrize(
    "what, reason",
    {
        "a window": r"layer 1 \(TransformerBlock\) stores its keys in a RotatingKVCache",
        "one projection": r"the attention of layer 0 \(TransformerBlock\) has no q_proj",
        "scaled embeddings": r"the logits computed layer by layer differ .*: the error is .*, the limit is",
    }.items(),
)
def test_a_draft_whose_attention_cannot_be_read_is_refused_with_the_reason(tmp_path, what, reason):
    family, changes = UNREADABLE[what]
    with pytest.raises(EngineFailed, match="the draft model cannot score prompts: " + reason):
        load(make(tmp_path / "draft", family, sliding_window=64, **changes))


def test_a_layer_that_is_read_wrongly_is_detected_at_the_start(checkpoint, monkeypatch):
    monkeypatch.setattr(attention, "_rotation", lambda name, attention: lambda queries, position: queries)
    for family in FAMILIES:
        with pytest.raises(
            EngineFailed, match=r"cannot score prompts: the output of layer \d differs from that computed"
        ):
            load(checkpoint(family))
