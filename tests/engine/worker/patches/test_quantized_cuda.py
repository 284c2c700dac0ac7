"""The products that CUDA gets are those of the library, whatever the number of rows."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.worker.patches import quantized_cuda

ROWS = [(1, 1), (2, 1), (3, 1), (1, 5), (8, 1), (3, 3), (16, 1), (1, 255), (1, 256), (2, 150)]


@pytest.mark.parametrize(("batch", "length"), ROWS)
@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layer_gives_the_products_of_the_library(batch, length, mode, bits, group_size, bias):
    mx.random.seed(batch * length)
    layer = nn.Linear(128, 96, bias=bias).to_quantized(group_size, bits, mode)
    x = mx.random.normal((batch, length, 128))
    found, expected = quantized_cuda.linear(layer, x), layer(x)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("batch", "length"), ROWS)
def test_tied_output_layer_gives_the_products_of_the_library(batch, length):
    mx.random.seed(batch * length)
    embedding = nn.Embedding(96, 128).to_quantized(64, 4)
    x = mx.random.normal((batch, length, 128))
    found, expected = quantized_cuda.as_linear(embedding, x), embedding.as_linear(x)
    assert found.shape == expected.shape
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-4)
