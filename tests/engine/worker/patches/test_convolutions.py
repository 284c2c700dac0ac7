"""Convolutions give what those of the library give, whatever the shape."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.worker.patches import convolutions, depthwise_cuda

TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
"""Largest difference between values of about 1: bfloat16 has 8 significant bits."""


def assert_same(layer: nn.Module, x: mx.array) -> None:
    found, expected = convolutions.convolve(layer, x), layer(x)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    difference = np.abs(np.array(found.astype(mx.float32)) - np.array(expected.astype(mx.float32)))
    assert difference.max() <= TOLERANCE[x.dtype]


@pytest.fixture
def library_calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that were left to the library."""
    called = list[nn.Module]()
    for kind, library_call in list(convolutions._library_calls.items()):

        def noted(layer: nn.Module, x: mx.array, library_call=library_call) -> mx.array:
            called.append(layer)
            return library_call(layer, x)

        monkeypatch.setitem(convolutions._library_calls, kind, noted)
    return called


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "taps"), [(1, 4, 4), (1, 7, 4), (3, 40, 4), (2, 9, 3), (2, 8, 8), (5, 4, 2)]
)
def test_depthwise_layer(batch, length, taps, bias, dtype, library_calls):
    mx.random.seed(length)
    layer = nn.Conv1d(48, 48, taps, groups=48, bias=bias)
    layer.set_dtype(dtype)
    assert_same(layer, mx.random.normal((batch, length, 48)).astype(dtype))
    assert not library_calls


@pytest.mark.parametrize("num_patches", [1, 7, 64])
@pytest.mark.parametrize(
    "layer", [nn.Conv3d(3, 32, (2, 4, 4), (2, 4, 4)), nn.Conv2d(3, 32, 4, 4, bias=False), nn.Conv1d(6, 32, 5)]
)
def test_layer_whose_kernel_covers_its_input(layer, num_patches, library_calls):
    mx.random.seed(num_patches)
    assert_same(layer, mx.random.normal((num_patches, *layer.weight.shape[1:])))
    assert not library_calls


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(8, 8, 4, padding=3, groups=8), (2, 9, 8)),
        (nn.Conv1d(8, 8, 4, stride=2, groups=8), (2, 9, 8)),
        (nn.Conv1d(8, 8, 3, dilation=2, groups=8), (2, 9, 8)),
        (nn.Conv1d(8, 8, 9, groups=8), (2, 12, 8)),
        (nn.Conv1d(8, 16, 4, groups=8), (2, 9, 8)),
        (nn.Conv1d(8, 8, 4, groups=2), (2, 4, 8)),
        (nn.Conv2d(3, 8, 4, 4), (1, 16, 16, 3)),
        (nn.Conv2d(3, 8, 4, 4, padding=1), (1, 4, 4, 3)),
    ],
)
def test_all_other_layers_are_left_to_the_library(layer, shape, library_calls):
    x = mx.random.normal(shape)
    mx.eval(convolutions.convolve(layer, x))
    assert library_calls == [layer]


@pytest.mark.parametrize(("length", "taps", "dtype"), [(37, 4, mx.bfloat16), (16, 3, mx.float32)])
def test_the_cuda_kernel_s_source_convolves_each_channel(cuda_on_cpu, length, taps, dtype):
    mx.random.seed(taps)
    x = mx.random.normal((2, length + taps - 1, 24)).astype(dtype)
    weight = mx.random.normal((24, taps, 1)).astype(dtype)
    found, expected = depthwise_cuda.convolve(x, weight), convolutions.depthwise(x, weight)
    assert found.shape == (2, length, 24) and found.dtype == dtype
    assert mx.abs(found - expected).max() <= TOLERANCE[dtype]
