"""Rows at different positions are rotated by their own, and the patches are still needed."""

import inspect
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.worker.patches import (
    glm_cast,
    internlm_rope,
    llama4_rows,
    qwen4_rows,
    recurrent_gemma_norm,
    row_positions,
)


@pytest.mark.parametrize("rope", [row_positions.JinaRoPE, *internlm_rope.LIBRARY])
def test_each_row_is_rotated_by_its_own_position(rope: Any):
    row_positions.install()
    internlm_rope.install()
    rotate, x = rope(16), mx.random.normal((3, 2, 4, 16), key=mx.random.key(1))
    together = np.array(rotate(x, offset=mx.array([0, 5, 9])))
    alone = [np.array(rotate(x[i : i + 1], offset=offset)) for i, offset in enumerate((0, 5, 9))]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


STILL_NEEDED = [
    (row_positions.LIBRARY[row_positions.JinaRoPE], "offset.max().item()"),
    (row_positions.LIBRARY[row_positions.hunyuan_vl.Attention], "cos = cos[-L:]"),
    (row_positions.LIBRARY[row_positions.GPTBigCodeModel], "np.arange(cache[0].offset"),
    (row_positions.LIBRARY[row_positions.Indexer], "row_pos = offset + mx.arange(s)"),
    (llama4_rows.LIBRARY[llama4_rows.Attention], "offset_scalar.max().item()"),
    (llama4_rows.LIBRARY[llama4_rows.LlamaModel], "offset.max().item()"),
    (qwen4_rows.LIBRARY["select"], "mx.maximum(query_ends[None] - left_padding[:, None], 0)"),
    (qwen4_rows.LIBRARY["make_cache"], "ArraysCache(size=4"),
    (qwen4_rows.LIBRARY["embed"], "(batch, self.context_len), self.eos_token_id"),
    (glm_cast.library_predicate.fget, "cast_predicate(self)"),
    *((rope, "scale=self.scale") for rope in internlm_rope.LIBRARY.values()),
]


@pytest.mark.parametrize(("function", "line"), STILL_NEEDED, ids=lambda value: getattr(value, "__qualname__", ""))
def test_the_library_still_computes_it_so(function: Any, line: str):
    """When this fails, see whether the patch can go."""
    assert line in inspect.getsource(function)


def test_the_library_still_gives_the_layers_of_recurrent_gemma_another_epsilon():
    """When this fails, see whether the patch can go."""
    block = inspect.getsource(recurrent_gemma_norm.Griffin).partition("ResidualBlock(")[2].partition(")")[0]
    assert "eps" not in block
