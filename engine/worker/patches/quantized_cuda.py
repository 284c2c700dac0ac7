"""Products with quantized weights on CUDA: all rows of a batch as one matrix.

MLX 0.32.4 chooses the kernel by the second-last dimension of its input. A decode step has 1 there, and each row is
multiplied by itself, which reads the weights once per row. On an H200 a product of 2560 x 18432 weights of 4 bits takes
0.035, 0.11, 0.16, 0.31 and 1.2 ms for 1, 4, 8, 16 and 64 rows [B, 1, 2560], and 0.038 ms for 8 rows [1, 8, 2560], where
a kernel for tensor cores begins. From some hundred rows on that kernel is slower than expanding the weights: 2048 rows
take 1.35 ms, and 0.38 ms with expanded ones. It can be removed when the library flattens its input itself.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

FEW_ROWS = 4
"""Up to this many rows a step is no slower with the library's product."""
TILE = 8
"""Fewest rows of the kernel for tensor cores; fewer ones are padded."""
MANY_ROWS = 256
"""From this many rows on the weights are expanded."""

_library_call: Any = nn.QuantizedLinear.__call__
_library_as_linear: Any = nn.QuantizedEmbedding.as_linear


def product(module: Any, x: mx.array) -> mx.array:
    """Return x [..., in] times the module's quantized weights: [..., out], without its bias."""
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    weights = module["weight"], module["scales"], module.get("biases")
    form = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    if rows >= MANY_ROWS:
        y = flat @ mx.dequantize(*weights, **form, dtype=x.dtype).T
    else:
        padded = mx.pad(flat, [(0, TILE - rows), (0, 0)]) if rows < TILE else flat
        y = mx.quantized_matmul(padded, *weights, transpose=True, **form)[:rows]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _is_few(x: mx.array) -> bool:
    return x.size <= FEW_ROWS * x.shape[-1]


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.QuantizedLinear.__call__`."""
    if _is_few(x):
        return _library_call(self, x)
    y = product(self, x)
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.QuantizedEmbedding.as_linear`."""
    return _library_as_linear(self, x) if _is_few(x) else product(self, x)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    nn.QuantizedLinear.__call__ = linear
    nn.QuantizedEmbedding.as_linear = as_linear
