"""SiLU on x86 CPUs with a polynomial for the exponential.

MLX 0.32.4 takes 15 ns for an exponential on x86 and is up to 62 ulp off; the polynomial of Cephes' expf in plain MLX
operations takes 4.5 ns as a compiled graph, and is less than 1 ulp off: prefill of 1024 tokens with the demo model
takes 24 % less CPU time. mlx_vlm calls `nn.silu` by its module and `swiglu` by name; `install` replaces both where the
Qwen and Llama families call them, for prompts alone: a decode step has so few numbers that a larger graph costs it more
than it gains (5 % with one row), and takes the library's functions whatever the number of rows. Each element is
computed by the same operations wherever it stands. It can go when MLX's CPU backend has a faster exponential on x86.
"""

import platform
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import mlp
from mlx_vlm.models.llama import language as llama
from mlx_vlm.models.qwen3_5 import language as qwen3_5
from mlx_vlm.models.qwen3_5 import speculative_verifier as qwen3_5_verifier

SMALLEST, LARGEST = mx.array(-87.0), mx.array(87.0)
"""Exponents beyond are taken for these: exp(-87) and exp(87) are still normal float32 numbers."""

LOG2_E = mx.array(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = mx.array(0.693359375), mx.array(-2.12194440e-4)
HIGHEST_COEFFICIENT = mx.array(1.9875691500e-4)
COEFFICIENTS = [
    mx.array(value) for value in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
]
ONE, EXPONENT_BIAS, EXPONENT_SHIFT = mx.array(1.0), mx.array(127, mx.int32), mx.array(23, mx.int32)
# Arrays, made once: from numbers each graph would make its own.

MIN_TOKENS = 16
"""Fewer are a decode step; as in attention_cpu."""

MAX_SHAPES = 64
"""Graphs kept of each function, of some kilobytes each; building one takes less than a millisecond."""


def exp(x: mx.array) -> mx.array:
    """e to the power of float32 numbers between -87 and 87; Cephes' expf (Moshier 1989)."""
    x = mx.minimum(mx.maximum(x, SMALLEST), LARGEST)
    whole = mx.round(x * LOG2_E)
    rest = x - whole * LN_2_HIGH - whole * LN_2_LOW
    polynomial = HIGHEST_COEFFICIENT * rest + COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        polynomial = polynomial * rest + coefficient
    power = mx.left_shift(whole.astype(mx.int32) + EXPONENT_BIAS, EXPONENT_SHIFT).view(mx.float32)
    return (polynomial * (rest * rest) + rest + ONE) * power


class PerShape:
    """Compiles a function for each shape it meets, least recently used first out.

    A graph that is compiled for any shape cannot look at the bits of a float.
    """

    def __init__(self, function: Callable[..., mx.array]):
        self._function = function
        self._graphs: OrderedDict[tuple[int, ...], Callable[..., mx.array]] = OrderedDict()

    def __call__(self, x: mx.array, *others: mx.array) -> mx.array:
        key = x.shape
        graph = self._graphs.pop(key, None) or mx.compile(self._function)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_SHAPES:
            self._graphs.popitem(last=False)
        return graph(x, *others)


_library_silu: Any = nn.silu
_library_swiglu: Any = vars(qwen3_5)["swiglu"]
_silu = PerShape(lambda x: x / (ONE + exp(-x)))
_swiglu = PerShape(lambda gate, x: gate / (ONE + exp(-gate)) * x)


def silu(x: mx.array) -> mx.array:
    """x [B, L, n]; of L < MIN_TOKENS the library's."""
    return _silu(x) if _is_prompt(x) else _library_silu(x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return _swiglu(gate, x) if _is_prompt(gate) and x.dtype == mx.float32 else _library_swiglu(gate, x)


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """SwiGLU of a gated norm, all [B, L, heads, n]."""
    return _swiglu(gate, x) if _is_prompt(gate) and x.dtype == h.dtype == mx.float32 else _library_precise(h, gate, x)


def _is_prompt(x: mx.array) -> bool:
    return x.dtype == mx.float32 and x.ndim >= 3 and x.shape[1] >= MIN_TOKENS


@partial(mx.compile, shapeless=True)
def _library_precise(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """The library's own, whose `nn` is not the one that `install` puts into its module."""
    return (_library_silu(gate.astype(mx.float32)) * x.astype(mx.float32)).astype(h.dtype)


def install() -> None:
    """Idempotent; for x86 alone.

    Not `nn.silu` itself: functions that the library compiles for any shape cannot call ours.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    for module in (qwen3_5, qwen3_5_verifier):
        vars(module)["nn"] = SimpleNamespace(**(vars(nn) | {"silu": silu}))
    for module in (mlp, llama, qwen3_5, qwen3_5_verifier):
        vars(module)["swiglu"] = swiglu
    namespace: Any = vars(qwen3_5)
    namespace["_precise_swiglu"] = precise_swiglu
