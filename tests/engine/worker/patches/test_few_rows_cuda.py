"""Which products CUDA's kernel for few rows takes; its results are checked on a GPU, by the self-test."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest

from engine.worker.patches import few_rows_cuda
from engine.worker.patches.few_rows_cuda import Weight


@pytest.mark.parametrize(
    ("shape", "num_outputs", "taken"),
    [
        ((1, 1, 64), 48, True),
        ((2, 1, 64), 48, True),
        ((1, 2, 64), 48, True),
        ((8, 4, 64), 48, True),
        ((33, 1, 64), 48, False),
        ((11, 3, 64), 48, False),
        ((2, 1, 80), 48, False),
        ((16, 1, 32), few_rows_cuda.MANY_OUTPUTS, True),
        ((17, 1, 32), few_rows_cuda.MANY_OUTPUTS, False),
        ((17, 1, 32), few_rows_cuda.MANY_OUTPUTS - 1, True),
    ],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_up_to_32_rows_are_taken(shape, num_outputs, taken, dtype):
    assert (
        few_rows_cuda.is_supported(mx.zeros(shape, dtype), Weight((mx.zeros((num_outputs, shape[-1]), dtype),)))
        is taken
    )


@pytest.mark.parametrize(
    ("of_rows", "of_weights"),
    [(mx.float32, mx.float32), (mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)],
)
def test_other_and_mixed_dtypes_are_the_library_s(of_rows, of_weights):
    assert not few_rows_cuda.is_supported(mx.zeros((2, 64), of_rows), Weight((mx.zeros((48, 64), of_weights),)))


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_kernel_does_not_take_is_computed_by_the_library(bias):
    layer, embedding, x = nn.Linear(64, 48, bias=bias), nn.Embedding(48, 64), mx.random.normal((2, 1, 64))
    assert mx.array_equal(few_rows_cuda.linear(layer, x), layer(x))
    assert mx.array_equal(few_rows_cuda.as_linear(embedding, x), embedding.as_linear(x))


def test_what_several_layers_compute_without_the_kernel_is_what_they_compute_alone():
    gate, up, x, to = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False), mx.ones((2, 1, 64)), mx.ones(48)
    first, second = few_rows_cuda.products((gate, up), x)
    assert mx.array_equal(first, gate(x)) and mx.array_equal(second, up(x))
    assert mx.allclose(few_rows_cuda.gated(gate, up, x), nn.silu(gate(x)) * up(x))
    assert mx.array_equal(few_rows_cuda.added(to, gate, x), to + gate(x))


def test_a_kernel_s_source_is_given_without_comments_and_indentation():
    assert few_rows_cuda.short("\n  // why\n    a = b;  // and how\n\n    c();\n") == "a = b;\nc();"
