"""Qwen3.5's layers with experts as CUDA computes them: by the library where no kernel applies, else on a CPU."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest
from mlx_vlm.models.cache import ArraysCache

from engine.worker.decoder_layer_checks import layers_of
from engine.worker.patches import experts_cuda, qwen35_moe_cuda
from tests.support.night import some_at_night


def test_a_layer_of_another_dtype_is_the_library_s():
    layer, x = layers_of(mx.float32)[2], mx.random.normal((2, 5, 128), key=mx.random.key(0))
    expected = layer(x, None, ArraysCache(2))
    assert mx.allclose(qwen35_moe_cuda.decoder_layer(layer, x, None, ArraysCache(2)), expected, rtol=1e-5, atol=1e-5)


def test_more_chosen_experts_than_a_warp_has_lanes_are_the_library_s():
    block = layers_of(mx.bfloat16)[2].mlp
    x = mx.zeros((2, 5, 128), mx.bfloat16)
    assert qwen35_moe_cuda.is_supported(block, x)
    block.top_k = qwen35_moe_cuda.MAX_CHOSEN + 1
    assert not qwen35_moe_cuda.is_supported(block, x)
    block.top_k, block.num_experts = 4, experts_cuda.MAX_EXPERTS + 1
    assert not qwen35_moe_cuda.is_supported(block, x)


@pytest.mark.parametrize(
    "shape", some_at_night([(2, 1, 128), (1, 5, 128)], [(1, 5, 128)], "test_experts_cuda.py has pairs by themselves")
)
def test_the_kernels_sources_compute_a_mixture(cuda_on_cpu, shape):
    """As the library does in float32, but for rounding, with the experts that the kernels chose."""
    block, norm = layers_of(mx.bfloat16)[2].mlp, nn.RMSNorm(128)
    norm.set_dtype(mx.bfloat16)
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(mx.bfloat16)
    block.gate.weight = 4 * block.gate.weight  # rounding must not choose others
    got = qwen35_moe_cuda.mixture(block, x, norm)
    block.set_dtype(mx.float32)
    exact = x.astype(mx.float32)
    expected = exact + block(norm(exact))
    assert got.shape == shape and got.dtype == mx.bfloat16
    assert mx.allclose(got.astype(mx.float32), expected, atol=0.02 * float(mx.abs(expected).max()))
