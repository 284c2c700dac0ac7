"""Molmo2's embedding copies no table, and looks up what the library does."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest
from mlx_vlm.models.molmo2.language import Molmo2Embedding

from engine.worker.patches import families, molmo2_embedding

NUM_TOKENS, HIDDEN = 4096, 256
TABLE_BYTES = NUM_TOKENS * HIDDEN * 2


def embedding(num_further: int) -> Any:
    families.correct()
    made: Any = Molmo2Embedding(NUM_TOKENS, num_further, HIDDEN)
    made.embedding = mx.random.normal((NUM_TOKENS, HIDDEN)).astype(mx.bfloat16)
    made.new_embedding = mx.random.normal((num_further, HIDDEN)).astype(mx.bfloat16)
    mx.eval(made.parameters())
    return made


def peak_bytes(call: Any, module: Any) -> int:
    """Return the bytes that a lookup of one token needs beyond the tables."""
    token = mx.array([[3]], mx.int32)
    mx.eval(token)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call(module, token))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32])
@pytest.mark.parametrize("num_further", [0, 8])
def test_lookups_are_those_of_the_library_to_the_bit(num_further: int, dtype: mx.Dtype):
    module, last = embedding(num_further), NUM_TOKENS + num_further - 1
    ids = mx.array([[0, NUM_TOKENS - 1, min(NUM_TOKENS, last)], [last, 5, max(last - 1, 0)]], dtype)
    found, expected = module(ids), molmo2_embedding.library_call(module, ids)
    assert found.shape == (2, 3, HIDDEN) and found.dtype == expected.dtype
    assert mx.array_equal(found, expected)


def test_no_table_is_copied_and_the_patch_is_still_needed():
    module = embedding(8)
    assert peak_bytes(Molmo2Embedding.__call__, module) < TABLE_BYTES / 8
    assert peak_bytes(molmo2_embedding.library_call, module) >= TABLE_BYTES


def test_the_tables_are_never_quantized():
    module = embedding(8)
    nn.quantize(model := nn.Sequential(module, nn.Linear(HIDDEN, HIDDEN)), group_size=64, bits=4)
    assert isinstance(model.layers[1], nn.QuantizedLinear) and model.layers[0] is module
    assert module.embedding.dtype == mx.bfloat16
