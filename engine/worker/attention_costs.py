"""Measures how much memory attention takes per query and key, on its own.

The probes of a whole forward (memory_costs.py) are short, and the peak of a forward is that of its largest layer: the
scores of attention exceed the other intermediate results only after a long prompt.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_vlm.models import base
from mlx_vlm.models.cache import KVCache, create_causal_mask

from engine.core.memory.costs import MemoryCosts
from engine.worker.patches import attention_cpu, prompt_attention_cuda
from engine.worker.quantized_kv import KVFormat
from engine.worker.snapshot import StateSnapshot

MARGIN = 1.15
"""Safety factor on the measured bytes."""

NUM_QUERIES = 48
NUM_KEYS = 1024, 2048
"""Prompt lengths of the two probes, from whose difference the bytes per query and key follow."""

FUSED_FROM = 1024
"""Queries from which on Metal MLX 0.32.4 computes heads of 256 numbers without storing scores on an M5
(mlx/backend/metal/scaled_dot_product_attention.cpp). Fewer queries do store them."""


def with_attention(
    costs: MemoryCosts,
    lm: Any,
    snapshot: StateSnapshot,
    num_heads: int,
    kv_formats: Sequence[KVFormat | None] = (),
    has_masks: bool = False,
) -> MemoryCosts:
    """Return the costs with at least the bytes that attention alone takes, see MemoryCosts.pair_bytes.

    Args:
        costs: Measured by the probes of whole forwards.
        lm: The library's language model.
        snapshot: A snapshot of any prompt, for the shapes of keys and values.
        num_heads: Query heads of an attention layer.
        kv_formats: How each attention layer of the snapshot packs its keys and values; empty if none does.
        has_masks: Whether a chunk with an image has a mask of its own over all keys, see image_attention.py.
    """
    used = _attention_of(lm)
    layers = snapshot.segment.keys_values
    pairs = zip(layers, kv_formats or [None] * len(layers), strict=True)
    shapes = {_shape(keys, values, kv_format) for (keys, values), kv_format in pairs}
    masks = (_causal, _own) if has_masks else (_causal,)
    probes = [(mask, one, num_heads, *shape) for mask in masks for one in used for shape in shapes if all(shape[:3])]
    found = max((_pair_bytes(NUM_QUERIES, *probe) for probe in probes), default=0.0)
    queries = attention_cpu.max_queries() if used == {attention_cpu.attention} else 2**31
    fused_from = FUSED_FROM if mx.metal.is_available() else prompt_attention_cuda.MIN_QUERIES
    has_fused = mx.metal.is_available() or mx.cuda.is_available()
    if costs.pair_bytes <= found > 0 and has_fused and not any(_pair_bytes(fused_from, *probe) for probe in probes):
        queries = fused_from - 1
    return replace(costs, pair_bytes=max(costs.pair_bytes, found), max_queries=queries)


def _shape(keys: mx.array, values: mx.array, kv_format: KVFormat | None) -> tuple[int, int, int, mx.Dtype]:
    """Return heads, dimensions of keys and of values, and dtype, as attention sees them."""
    if kv_format is None:
        return keys.shape[1], keys.shape[3], values.shape[3], keys.dtype
    return kv_format.keys.num_heads, kv_format.keys.head_dim, kv_format.values.head_dim, kv_format.keys.dtype


def _attention_of(lm: Any) -> set[Callable[..., mx.array]]:
    """Return the functions that the model's modules call for attention, which a patch may have replaced."""
    modules = {sys.modules[type(module).__module__] for _, module in lm.named_modules()}
    found = {vars(module).get("scaled_dot_product_attention") for module in modules}
    return {attend for attend in found if attend is not None} or {base.scaled_dot_product_attention}


def _causal(num_queries: int, num_keys: int) -> str:
    return "causal"


def _own(num_queries: int, num_keys: int) -> mx.array:
    """Return a mask [queries, keys] that is made as that of a chunk with an image."""
    mask = create_causal_mask(num_queries, num_keys - num_queries)
    own = mask[:, -num_queries:] | mx.eye(num_queries, dtype=mx.bool_)
    return mx.concatenate([mask[:, :-num_queries], own], axis=1)


def _pair_bytes(
    num_queries: int,
    mask: Callable[[int, int], mx.array | str],
    attend: Callable[..., mx.array],
    num_heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
) -> float:
    def peak(num_keys: int) -> int:
        queries = mx.zeros((1, max(num_heads // kv_heads, 1) * kv_heads, num_queries, key_dim), dtype)
        keys, values = (mx.zeros((1, kv_heads, num_keys, dim), dtype) for dim in (key_dim, value_dim))
        mx.eval(queries, keys, values)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attend(queries, keys, values, cache=KVCache(), scale=1.0, mask=mask(num_queries, num_keys)))
        return mx.get_peak_memory() - before

    few, many = map(peak, NUM_KEYS)
    return MARGIN * max(0, many - few) / (num_queries * (NUM_KEYS[1] - NUM_KEYS[0]))
