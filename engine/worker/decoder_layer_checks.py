"""Checks of whole decoder layers of Qwen3.5: the ways in which steps compute tokens against each other."""

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import ArraysCache, KVCache
from mlx_vlm.models.qwen3_5 import language
from mlx_vlm.models.qwen3_5.config import TextConfig
from mlx_vlm.models.qwen3_5_moe import config as moe_config
from mlx_vlm.models.qwen3_5_moe import language as moe_language

from engine.worker import devices
from engine.worker.cursor import Cursor
from engine.worker.kernel_figure import LIMIT, KernelFigure, error_of
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.recurrent_layer import BatchRecurrentLayer

LAYERS = TextConfig(
    model_type="qwen3_5_text",
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    vocab_size=128,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
)
"""Two layers in Qwen3.5's form, a recurrent one and one of attention."""
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def decoder_layers() -> KernelFigure:
    """Compute five tokens of three rows by layers of Qwen3.5 in float32: at once, one by one, and as a verification.

    On CUDA the steps and the verification have kernels of Orchard.
    """
    errors = []
    for layer in layers_of(mx.float32):
        x = mx.random.normal((3, 5, 128), key=mx.random.key(2))
        whole: Any = ArraysCache(2) if layer.is_linear else KVCache()
        expected = _forward(layer, x, whole, 0, None if layer.is_linear else "causal")
        (steps, rows), (verified, verifying) = _in_steps(layer, x), _verified(layer, x)
        errors += [error_of(steps, expected), error_of(verified, expected)]
        errors += [error_of(got, of) for got, of in zip(verifying.state, rows.state, strict=True)]
    return KernelFigure(max(errors), LIMIT, f"{devices.device_kind()} kernels")


def same_bits() -> KernelFigure | str:
    """Compute tokens by layers of Qwen3.5, in bfloat16 and in 4 bits, in every way that steps do: the same bits."""
    if devices.device_kind() != "cuda":
        return "Orchard's kernels of whole layers are for CUDA alone"
    different = 0
    quantized = layers_of(mx.bfloat16)
    for layer in quantized:
        nn.quantize(layer, group_size=64, bits=4)
    for layer in (*layers_of(mx.bfloat16), *quantized):
        x = mx.random.normal((3, 5, 128), key=mx.random.key(2)).astype(mx.bfloat16)
        steps = _in_steps(layer, x)[0]
        alone = mx.concatenate([_in_steps(layer, x[i : i + 1])[0] for i in range(3)])
        different += sum(int((one != steps).sum()) for one in (alone, _verified(layer, x)[0]))
    return KernelFigure(different, 0, "numbers that differ: rows alone and together, tokens verified and one by one")


def layers_of(dtype: mx.Dtype) -> list[Any]:
    """Return the layers: a recurrent one and one of attention with an MLP, and two such layers with experts."""
    fields = {field.name for field in dataclasses.fields(moe_config.TextConfig)}
    shared = {name: value for name, value in vars(LAYERS).items() if name in fields}
    with_experts = moe_config.TextConfig(**shared, **EXPERTS)
    indices = range(LAYERS.num_hidden_layers)
    layers: list[Any] = [language.Qwen3_5DecoderLayer(LAYERS, index) for index in indices]
    layers += [moe_language.Qwen3_5MoeDecoderLayer(with_experts, index) for index in indices]
    for layer in layers:
        layer.set_dtype(dtype)
    return layers


def _in_steps(layer: Any, x: mx.array) -> tuple[mx.array, Any]:
    """Return the outputs for x [B, L, 128], one token after the other, and the cache."""
    rows, steps = _no_tokens(layer, x), []
    for t in range(x.shape[1]):
        steps.append(_forward(layer, x[:, t : t + 1], rows, t))
        mx.eval(rows.state)
    return mx.concatenate(steps, axis=1), rows


def _verified(layer: Any, x: mx.array) -> tuple[mx.array, Any]:
    """Return the outputs for x [B, L, 128] as one verification of which all is kept, and the cache."""
    rows = _no_tokens(layer, x)
    rows.recording = True
    y = _forward(layer, x, rows, 0)
    rows.commit(mx.full(x.shape[0], x.shape[1], mx.int32))
    return y, rows


def _no_tokens(layer: Any, x: mx.array) -> Any:
    """Return the layer's cache for the rows of x, without tokens."""
    num_rows = x.shape[0]
    if not layer.is_linear:
        slots = mx.zeros((num_rows, 2, 8, 64), x.dtype)
        return BatchKVLayer(slots, slots, Cursor(mx.zeros(num_rows, mx.int32), 8))
    delta = layer.linear_attn
    sizes = (delta.num_v_heads, delta.head_v_dim, delta.head_k_dim)
    window = mx.zeros((num_rows, delta.conv_kernel_size - 1, delta.conv_dim), x.dtype)
    return BatchRecurrentLayer([window, mx.zeros((num_rows, *sizes))])


def _forward(layer: Any, x: mx.array, layer_cache: Any, start: int, mask: Any = None) -> mx.array:
    """Return the layer's output for x [B, L, 128] behind `start` tokens. mask: None for that of the rows' cache."""
    if layer.is_linear:
        return layer(x, None, layer_cache)
    positions = mx.broadcast_to(start + mx.arange(x.shape[1], dtype=mx.int32), (3, *x.shape[:2]))
    if mask is None:
        layer_cache.cursor.start = mx.full(x.shape[0], start, mx.int32)
        mask = layer_cache.make_mask(x.shape[1])
    return layer(x, mask, layer_cache, positions, layer.self_attn.rotary_emb(x, positions))
