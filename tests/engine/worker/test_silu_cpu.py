"""SiLU by a polynomial: as accurate as the library's, the same for an element wherever it stands."""

import platform

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.qwen3_5 import language

from engine.worker.patches import silu_cpu

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 alone")


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))


def ulps(found: mx.array, expected: np.ndarray) -> np.ndarray:
    return np.abs(np.array(found, np.float64) - expected) / np.spacing(np.abs(expected).astype(np.float32))


@pytest.mark.parametrize("largest, most", [(5, 2.5), (20, 2.5), (80, 2.5)])
def test_silu_is_no_less_accurate_than_the_librarys(largest, most):
    x = np.linspace(-largest, largest, 400_001).astype(np.float32)
    ours = ulps(silu_cpu.silu(mx.array(x)[None, :, None])[0, :, 0], exact(x)).max()
    assert ours <= most and ours <= ulps(silu_cpu._library_silu(mx.array(x)), exact(x)).max()


def test_exponential_is_within_one_unit_in_the_last_place():
    x = np.linspace(-87, 87, 400_001).astype(np.float32)
    assert ulps(silu_cpu.exp(mx.array(x)), np.exp(x.astype(np.float64))).max() < 1


def test_an_element_gets_the_same_alone_and_at_any_place():
    x = mx.random.normal((3, 50, 77), key=mx.random.key(0)) * 6
    whole = np.array(silu_cpu.swiglu(x, x))
    for row in range(3):
        alone = np.array(silu_cpu.swiglu(x[row : row + 1, 5:40], x[row : row + 1, 5:40]))
        assert np.array_equal(alone[0], whole[row, 5:40])
    singles = [np.array(silu_cpu.swiglu(x[..., i : i + 1], x[..., i : i + 1])) for i in range(77)]
    assert np.array_equal(np.concatenate(singles, axis=-1), whole)
    columns = np.array(silu_cpu.swiglu(x.swapaxes(0, 2), x.swapaxes(0, 2)))
    assert np.array_equal(columns.swapaxes(0, 2), whole), "strides change nothing"


@pytest.mark.parametrize("num_rows", [1, 16])
def test_decode_steps_take_the_librarys_whatever_the_number_of_rows(num_rows):
    x = mx.random.normal((num_rows, 9, 64), key=mx.random.key(3)) * 6
    assert mx.array_equal(silu_cpu.silu(x), silu_cpu._library_silu(x))
    assert mx.array_equal(silu_cpu.swiglu(x, x), silu_cpu._library_swiglu(x, x))
    prompt = mx.random.normal((num_rows, 16, 64), key=mx.random.key(4)) * 6
    assert not mx.array_equal(silu_cpu.silu(prompt), silu_cpu._library_silu(prompt))
    assert mx.allclose(silu_cpu.silu(prompt), silu_cpu._library_silu(prompt), rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_stays_so_and_far_ends_are_those_of_the_function():
    values = mx.array([np.nan, np.inf, 1000.0, -1000.0, 0.0], mx.float32)
    found = np.array(silu_cpu.silu(mx.broadcast_to(values, (1, 16, 5))))[0, 7]
    assert np.isnan(found[0]) and found[1] == np.inf and found[2] == 1000 and abs(found[3]) < 1e-30 and found[4] == 0


def test_other_precisions_are_the_librarys():
    x = mx.random.normal((4, 33, 2), key=mx.random.key(1)).astype(mx.bfloat16)
    assert silu_cpu.silu(x).dtype == mx.bfloat16
    assert mx.array_equal(silu_cpu.silu(x), silu_cpu._library_silu(x))
    assert mx.array_equal(silu_cpu.swiglu(x, x), silu_cpu._library_swiglu(x, x))


def test_graphs_are_kept_for_the_latest_shapes_alone():
    function = silu_cpu.PerShape(lambda x: x + 1)
    for size in range(1, silu_cpu.MAX_SHAPES + 20):
        assert function(mx.zeros(size)).shape == (size,)
    assert len(function._graphs) == silu_cpu.MAX_SHAPES


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_modules_call_ours_and_give_what_the_library_gives(dtype):
    x = mx.random.normal((1, 20, 8), key=mx.random.key(2)).astype(dtype)
    norm = language.Qwen3_5RMSNormGated(8)
    expected = (norm(x).astype(mx.float32) * silu_cpu._library_silu(x.astype(mx.float32))).astype(dtype)
    silu_cpu.install()
    silu_cpu.install()
    assert vars(language)["swiglu"] is silu_cpu.swiglu and vars(language)["nn"].silu is silu_cpu.silu
    assert nn.silu is silu_cpu._library_silu, "which the library compiles into other functions"
    assert mx.allclose(norm(x, x), expected, rtol=1e-2 if dtype == mx.bfloat16 else 1e-5, atol=1e-6)
