"""SiLU on x86 CPUs by a rational function.

MLX 0.32.4 takes 16 ns for an exponential on x86, as its compiled kernels call fmaf for each. tanh as a quotient of two
polynomials is vectorized by the compiler that MLX calls: 3.3 ns per SiLU, with a relative error of at most 2e-7 (the
library's: 1.1e-7). Prompts of the demo model take 30 % less time. mlx_vlm calls `nn.silu` by its module and `swiglu` by
name; `install` replaces both where the Qwen and Llama families call them. Small arrays, as in a decode step of few
rows, use the library's functions: a larger graph costs more than it saves. It can be removed when MLX's CPU backend has
a faster exponential on x86.
"""

import platform
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import mlp
from mlx_vlm.models.llama import language as llama
from mlx_vlm.models.qwen3_5 import language as qwen3_5
from mlx_vlm.models.qwen3_5 import speculative_verifier as qwen3_5_verifier

MIN_SIZE = 2**14
"""Smaller arrays use the library's functions."""

HALF, SMALLEST, LARGEST = mx.array(0.5), mx.array(-9.0), mx.array(9.0)
"""tanh(SMALLEST) is -1 and tanh(LARGEST) is 1 in float32; larger arguments are clamped to them."""

NUMERATOR = [
    mx.array(value)
    for value in (0.9999999065143689, 0.13373228472373472, 3.4866175666949935e-3, 2.047238418248323e-5, 1.318493e-8)
]
DENOMINATOR = [
    mx.array(value)
    for value in (1.0, 0.46706525387748965, 0.02584211715037315, 3.2714422689520675e-4, 7.702965376813671e-7)
]
"""Coefficients of y**0, y**2, ...: tanh(y) = y * numerator / denominator between SMALLEST and LARGEST. Fitted by
iteratively reweighted least squares to the smallest maximum error, 1.9e-8. Arrays, because graphs would create arrays
from numbers each time."""

_library_silu: Any = nn.silu
_library_swiglu: Any = vars(qwen3_5)["swiglu"]


def _sigmoid(x: mx.array) -> mx.array:
    y = mx.minimum(mx.maximum(x * HALF, SMALLEST), LARGEST)
    squared = y * y
    return HALF + HALF * (y * _polynomial(NUMERATOR, squared) / _polynomial(DENOMINATOR, squared))


def _polynomial(coefficients: Sequence[mx.array], x: mx.array) -> mx.array:
    total = coefficients[-1] * x + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        total = total * x + coefficient
    return total


@partial(mx.compile, shapeless=True)
def _silu(x: mx.array) -> mx.array:
    return x * _sigmoid(x)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * _sigmoid(gate) * x


@partial(mx.compile, shapeless=True)
def _library_precise(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Compute the library's function with its original `nn`."""
    return (_library_silu(gate.astype(mx.float32)) * x.astype(mx.float32)).astype(h.dtype)


def silu(x: mx.array) -> mx.array:
    """Compute SiLU, for large arrays by the rational function."""
    return _silu(x) if _is_large(x) else _library_silu(x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute SwiGLU, for large arrays by the rational function."""
    return _swiglu(gate, x) if _is_large(gate) and x.dtype == mx.float32 else _library_swiglu(gate, x)


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Compute SwiGLU of a gated norm, for large arrays by the rational function."""
    return _swiglu(gate, x) if _is_large(gate) and x.dtype == h.dtype == mx.float32 else _library_precise(h, gate, x)


def _is_large(x: mx.array) -> bool:
    return x.size >= MIN_SIZE and x.dtype == mx.float32


def install() -> None:
    """Replace the functions in the supported models; x86 only. May be called several times.

    `nn.silu` itself is not replaced: functions that the library compiles for any shape cannot call this one.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    for module in (qwen3_5, qwen3_5_verifier):
        vars(module)["nn"] = SimpleNamespace(**(vars(nn) | {"silu": silu}))
    for module in (mlp, llama, qwen3_5, qwen3_5_verifier):
        vars(module)["swiglu"] = swiglu
    namespace: Any = vars(qwen3_5)
    namespace["_precise_swiglu"] = precise_swiglu
