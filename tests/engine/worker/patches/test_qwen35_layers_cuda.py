"""Qwen3.5's layers as CUDA computes them, here with plain operations in the kernels' place.

The kernels are checked on a GPU, by the self-test.
"""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
from typing import Any

import mlx.nn as nn
import pytest
from mlx_vlm.models.cache import ArraysCache, KVCache
from mlx_vlm.models.qwen3_5 import language
from mlx_vlm.models.rope_utils import apply_multimodal_rotary_pos_emb

from engine.worker.cursor import Cursor
from engine.worker.decoder_layer_checks import LAYERS
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.patches import (
    delta_layer_cuda,
    few_rows_cuda,
    qwen35_layers_cuda,
    rotated_heads_cuda,
    step_attention_cuda,
)
from engine.worker.quantized_kv import KVFormat
from engine.worker.recurrent_layer import BatchRecurrentLayer

POSITIONS = mx.broadcast_to(mx.arange(5, dtype=mx.int32), (3, 2, 5))
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put plain operations in the place of the attention layer's kernels; return the tokens of each attention."""
    lengths: list[int] = []

    def rotated_heads(layer: Any, queries: mx.array, keys: mx.array, cosines: mx.array, sines: mx.array) -> Any:
        shape = queries.shape[:2]
        q = layer.q_norm(queries.reshape(*shape, HEADS, 2 * HEAD_DIM)[..., :HEAD_DIM])
        k = layer.k_norm(keys.reshape(*shape, KV_HEADS, HEAD_DIM))
        q, k = (one.transpose(0, 2, 1, 3) for one in (q, k))
        rotated: Any = apply_multimodal_rotary_pos_emb(q, k, cosines, sines)
        q, k = rotated
        return q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)

    def attend(queries, gates, cache, scale):
        lengths.append(queries.shape[1])
        mask = cache.make_mask(queries.shape[1], return_array=True)
        y = mx.fast.scaled_dot_product_attention(
            queries.transpose(0, 2, 1, 3), cache.keys, cache.values, scale=scale, mask=mask
        )
        gate = gates.reshape(*queries.shape[:3], 2 * HEAD_DIM)[..., HEAD_DIM:]
        return (y.transpose(0, 2, 1, 3) * mx.sigmoid(gate)).reshape(*queries.shape[:2], -1)

    monkeypatch.setattr(rotated_heads_cuda, "rotated_heads", rotated_heads)
    monkeypatch.setattr(step_attention_cuda, "attend", attend)
    return lengths


@pytest.fixture
def x() -> mx.array:
    return mx.random.normal((2, 5, 128), key=mx.random.key(0))


def layer_of(index: int) -> Any:
    layer = language.Qwen3_5DecoderLayer(LAYERS, index)
    mx.eval(layer.parameters())
    return layer


def rows_of(delta: Any, dtype: mx.Dtype = mx.float32) -> BatchRecurrentLayer:
    state = mx.zeros((2, delta.num_v_heads, delta.head_v_dim, delta.head_k_dim))
    return BatchRecurrentLayer([mx.zeros((2, 3, delta.conv_dim), dtype), state])


def test_a_recurrent_layer_without_the_kernels_is_the_library_s(x):
    layer = layer_of(0)
    expected = layer(x, None, ArraysCache(2))
    got = qwen35_layers_cuda.decoder_layer(layer, x, None, ArraysCache(2))
    assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5)
    alone = qwen35_layers_cuda.recurrent(layer.linear_attn, x, None, ArraysCache(2))
    assert mx.array_equal(alone, layer.linear_attn(x, None, ArraysCache(2)))


@pytest.mark.parametrize("gives_rotary", [True, False])
def test_an_attention_layer_is_the_library_s(x, gives_rotary, attended):
    layer = layer_of(1)
    rotary = layer.self_attn.rotary_emb(x, POSITIONS) if gives_rotary else None
    expected = layer(x, "causal", KVCache(), POSITIONS, rotary)
    got = qwen35_layers_cuda.decoder_layer(layer, x, "causal", KVCache(), POSITIONS, rotary)
    assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert not attended  # which is for decode groups


def test_an_attention_layer_of_positions_that_the_kernel_does_not_support_is_the_library_s(x):
    layer = layer_of(1)
    rotary = layer.self_attn.rotary_emb(x[:1], POSITIONS[:, :1])  # of one row, for both
    expected = layer(x, "causal", KVCache(), POSITIONS, rotary)
    got = qwen35_layers_cuda.decoder_layer(layer, x, "causal", KVCache(), POSITIONS, rotary)
    assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (4, 1, 16), (17, 2)])
def test_steps_of_a_decode_group_are_the_library_s(lengths, attended):
    layer, num_tokens, done = layer_of(1), sum(lengths), 0
    x = mx.random.normal((2, num_tokens, 128), key=mx.random.key(0))
    positions = mx.broadcast_to(mx.arange(num_tokens, dtype=mx.int32), (3, 2, num_tokens))
    expected = layer(x, "causal", KVCache(), positions)
    slots = mx.zeros((2, KV_HEADS, 32, HEAD_DIM))
    rows, steps = BatchKVLayer(slots, slots, Cursor(mx.zeros(2, mx.int32), 32)), []
    for length in lengths:
        rows.cursor.start = mx.full(2, done, mx.int32)
        new = slice(done, done + length)
        mask = rows.make_mask(length)
        steps.append(qwen35_layers_cuda.decoder_layer(layer, x[:, new], mask, rows, positions[:, :, new]))
        done += length
    assert mx.allclose(mx.concatenate(steps, axis=1), expected, rtol=1e-5, atol=1e-5)
    assert attended == [length for length in lengths if length <= step_attention_cuda.MAX_TOKENS]


def test_the_attention_of_steps_takes_plain_keys_of_few_tokens_alone(x):
    layer, slots = layer_of(1).self_attn, mx.zeros((2, KV_HEADS, 32, HEAD_DIM))
    rows = BatchKVLayer(slots, slots, Cursor(mx.zeros(2, mx.int32), 32))
    assert step_attention_cuda.is_supported(layer, x, rows)
    assert not step_attention_cuda.is_supported(layer, mx.zeros((2, 17, 128)), rows)
    assert not step_attention_cuda.is_supported(layer, x.astype(mx.bfloat16), rows)
    assert not step_attention_cuda.is_supported(layer, x, KVCache())
    packed = BatchKVLayer(slots, slots, rows.cursor, KVFormat.of(slots, slots, 8))
    assert not step_attention_cuda.is_supported(layer, x, packed)


def test_an_attention_layer_uses_what_was_projected_at_once_and_adds_the_rest(x, monkeypatch, attended):
    """The products stand for the kernel: each layer's result is marked, and must be in what the layer computes."""
    layer = layer_of(1).self_attn
    calls = []

    def products(layers, rows, norm):
        assert norm is None
        calls.append([one.weight.shape[0] for one in layers])
        return [one(rows) * 2 for one in layers]

    def added(to, one, rows):
        calls.append("added")
        return to + one(rows)

    monkeypatch.setattr(few_rows_cuda, "products", products)
    monkeypatch.setattr(few_rows_cuda, "added", added)
    got = qwen35_layers_cuda.attention(layer, x, "causal", KVCache(), POSITIONS, to=x)
    plain = layer_of(1).self_attn
    plain.update(layer.parameters())
    for name in ("q_proj", "k_proj", "v_proj"):
        plain[name].weight = 2 * plain[name].weight
    assert calls == [[512, 128, 128], "added"]
    assert mx.allclose(got, x + plain(x, "causal", KVCache(), POSITIONS), rtol=1e-4, atol=1e-4)


def test_the_kernel_takes_steps_of_a_decode_group_alone(x):
    delta = layer_of(0).linear_attn
    rows, step = rows_of(delta), x[:, :1]
    assert delta_layer_cuda.is_supported(delta, step, None, rows)
    assert delta_layer_cuda.is_supported(delta, mx.zeros((2, 16, 128)), None, rows)
    assert not delta_layer_cuda.is_supported(delta, mx.zeros((2, 17, 128)), None, rows)
    assert not delta_layer_cuda.is_supported(delta, step, mx.ones((2, 1), mx.bool_), rows)
    assert not delta_layer_cuda.is_supported(delta, step, None, ArraysCache(2))
    assert not delta_layer_cuda.is_supported(delta, step, None, rows_of(delta, mx.bfloat16))
    assert not delta_layer_cuda.is_supported(nn.Linear(2, 2), step, None, rows)


def test_a_layer_that_recorded_all_states_returns_to_that_of_each_row():
    delta = layer_of(0).linear_attn
    rows = rows_of(delta)
    windows = mx.random.normal((2, 3 + 4, delta.conv_dim), key=mx.random.key(1))
    states = mx.random.normal((2, 4, *rows[1].shape[1:]), key=mx.random.key(2))
    rows.recording = True
    rows.record(windows, states)
    assert all(mx.array_equal(a, b) for a, b in zip(rows.recorded, (windows, states), strict=True))
    rows.commit(mx.array([1, 4], mx.int32))
    assert mx.array_equal(rows[0], mx.stack([windows[0, 1:4], windows[1, 4:7]]))
    assert mx.array_equal(rows[1], mx.stack([states[0, 0], states[1, 3]]))
