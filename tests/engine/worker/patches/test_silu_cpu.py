"""SiLU by a rational function: accurate, the same for a number wherever it stands, for large arrays alone."""

import platform

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.worker.patches import silu_cpu

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 alone")


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("largest", [1, 5, 20, 80])
def test_the_error_is_a_few_units_in_the_last_place_of_the_argument(largest):
    x = np.linspace(-largest, largest, 400_001).astype(np.float32)
    error = np.abs(np.array(silu_cpu.silu(mx.array(x)), np.float64) - exact(x))
    assert (error <= 2e-7 * np.abs(x)).all()


def test_a_number_gets_the_same_result_at_any_place_of_an_array():
    x = mx.random.normal((3, 500, 77), key=mx.random.key(0)) * 6
    whole = np.array(silu_cpu.swiglu(x, x))
    for row in range(3):
        alone = np.array(silu_cpu.swiglu(x[row : row + 1, 5:400], x[row : row + 1, 5:400]))
        assert np.array_equal(alone[0], whole[row, 5:400])
    columns = np.array(silu_cpu.swiglu(x.swapaxes(0, 2), x.swapaxes(0, 2)))
    assert np.array_equal(columns.swapaxes(0, 2), whole), "strides change nothing"


def test_small_arrays_use_the_function_of_the_library():
    x = mx.random.normal((8, 4, 256), key=mx.random.key(3)) * 6
    assert mx.array_equal(silu_cpu.silu(x), silu_cpu._library_silu(x))
    assert mx.array_equal(silu_cpu.swiglu(x, x), silu_cpu._library_swiglu(x, x))
    prompt = mx.random.normal((1, 64, 256), key=mx.random.key(4)) * 6
    assert not mx.array_equal(silu_cpu.silu(prompt), silu_cpu._library_silu(prompt))
    assert mx.allclose(silu_cpu.silu(prompt), silu_cpu._library_silu(prompt), rtol=1e-6, atol=1e-5)


def test_nan_and_infinity_stay_so_and_large_inputs_give_the_limits_of_the_function():
    values = mx.array([np.nan, np.inf, 1000.0, -1000.0, 0.0], mx.float32)
    found = np.array(silu_cpu.silu(mx.broadcast_to(values, (1, 2**14, 5))))[0, 7]
    assert np.isnan(found[0]) and found[1] == np.inf and found[2] == 1000 and abs(found[3]) < 2e-4 and found[4] == 0


def test_arrays_of_other_precisions_use_the_function_of_the_library():
    x = mx.random.normal((4, 33, 256), key=mx.random.key(1)).astype(mx.bfloat16)
    assert silu_cpu.silu(x).dtype == mx.bfloat16
    assert mx.array_equal(silu_cpu.silu(x), silu_cpu._library_silu(x))
    assert mx.array_equal(silu_cpu.swiglu(x, x), silu_cpu._library_swiglu(x, x))
