"""The bytes of attention scores are known, although the short probes of a whole forward do not show them."""

import platform

import pytest

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.worker import attention_costs, warm_up
from engine.worker.attention_costs import with_attention
from engine.worker.model_runner import load_runner
from engine.worker.patches.attention_cpu import BLOCK_QUERIES
from engine.worker.snapshot import DeviceSegment, StateSnapshot
from tests.support.families import FAMILIES
from tests.support.zoo import make

NUM_HEADS = 4
FLOAT_BYTES = 4


@pytest.mark.parametrize(("family", "is_patched"), [("qwen3_5", True), ("gemma2", False)])
def test_scores_count_whatever_the_other_layers_take(family, is_patched, tmp_path):
    runner = load_runner(EngineConfig(model=str(make(tmp_path, FAMILIES[family])), device="cpu"), lambda progress: None)
    _, snapshot = warm_up.time_steps(runner, 1)
    assert snapshot is not None
    lm = runner._language_model.lm
    found = with_attention(MemoryCosts(), lm, snapshot, NUM_HEADS)
    assert NUM_HEADS * FLOAT_BYTES <= found.pair_bytes <= 4 * NUM_HEADS * FLOAT_BYTES
    is_blocked = is_patched and platform.machine() in ("x86_64", "AMD64")
    assert found.max_queries == (BLOCK_QUERIES if is_blocked else 2**31)
    assert with_attention(MemoryCosts(pair_bytes=1e6), lm, snapshot, NUM_HEADS).pair_bytes == 1e6


def test_scores_that_a_fused_kernel_spares_long_chunks_count_for_short_ones_alone(monkeypatch):
    """As heads of 256 numbers on an M5."""

    def fused(queries, keys, values, cache, scale, mask):
        if queries.shape[2] < attention_costs.FUSED_FROM:
            scores = mx.zeros((*queries.shape[:3], keys.shape[2])) + queries[..., :1]
            mx.eval(scores)
        return queries * scale

    segment = DeviceSegment(None, [(mx.zeros((1, 2, 8, 256)), mx.zeros((1, 2, 8, 256)))], (8,))
    snapshot = StateSnapshot(8, segment, (), None, (), (1,), (0,), ())
    monkeypatch.setattr(attention_costs, "_attention_of", lambda lm: {fused})
    assert with_attention(MemoryCosts(), None, snapshot, NUM_HEADS).max_queries == 2**31
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    costs = with_attention(MemoryCosts(), None, snapshot, NUM_HEADS)
    assert costs.max_queries == attention_costs.FUSED_FROM - 1
    assert NUM_HEADS * FLOAT_BYTES <= costs.pair_bytes <= 2 * NUM_HEADS * FLOAT_BYTES
    assert costs.chunk(4096, 8192) == costs.chunk(1023, 8192) > costs.chunk(512, 8192)


def test_masks_of_chunks_with_images_count_where_no_scores_are_stored(monkeypatch):
    """Both their own array and that of the cache exist for a moment; chunks of any length have them."""

    def fused(queries, keys, values, cache, scale, mask):
        return queries * scale if isinstance(mask, str) else mx.where(mask[:, :1], queries, 0.0)

    segment = DeviceSegment(None, [(mx.zeros((1, 2, 8, 256)), mx.zeros((1, 2, 8, 256)))], (8,))
    snapshot = StateSnapshot(8, segment, (), None, (), (1,), (0,), ())
    monkeypatch.setattr(attention_costs, "_attention_of", lambda lm: {fused})
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert with_attention(MemoryCosts(), None, snapshot, NUM_HEADS).pair_bytes == 0
    costs = with_attention(MemoryCosts(), None, snapshot, NUM_HEADS, has_masks=True)
    assert 1 <= costs.pair_bytes <= 4 and costs.max_queries == 2**31
