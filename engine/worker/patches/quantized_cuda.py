"""Products with quantized weights on CUDA: few rows by a kernel of Orchard, more by expanded weights.

MLX 0.32.4 chooses the kernel by the second-last dimension of its input. A decode step has 1 there, and each row is
multiplied by itself, which reads the weights once per row. On an H200 a product of 2560 x 18432 weights of 4 bits takes
0.035, 0.11, 0.16, 0.31 and 1.2 ms for 1, 4, 8, 16 and 64 rows [B, 1, 2560], and 0.038 ms for 8 rows [1, 8, 2560], where
a kernel for tensor cores begins. That kernel is slower than expanding the weights: by a kernel of Orchard from 33 rows
on (a step of 64 rows takes 21.3 ms, and 14.4 with expanded weights), by the library's from some hundred on (2048 rows:
1.35 and 0.38 ms). Up to 128 rows are multiplied without either (few_rows_cuda.py). It can be removed when the library
flattens its input itself, and has a kernel whose results for a row do not depend on the rows beside it (see
few_rows_cuda).
"""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.patches import few_rows_cuda
from engine.worker.patches.few_rows_cuda import Weight
from engine.worker.patches.few_rows_kernel import NAMES, header

FEW_ROWS = 4
"""Up to this many rows a step is no slower with the library's product, where few_rows_cuda has none."""
TILE = 8
"""Fewest rows of the library's kernel for tensor cores; fewer ones are padded."""
MANY_ROWS = 256
"""From this many rows on all weights are expanded. For fewer rows it is those that a kernel of Orchard expands and that
have fewer than MANY_OUTPUTS outputs: expanded, the output layer of Qwen3.5-4B would take a gigabyte."""
THREADS = 256
"""Threads of a block that expands weights, eight numbers each."""

_EXPANSION = """
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= size_t(w_shape[0]) * w_shape[1] * 4 / Bits) return;
    const unsigned short* factors[] = {
        reinterpret_cast<const unsigned short*>(scales), reinterpret_cast<const unsigned short*>(biases)};
    const size_t group = at * 8 / (w_shape[1] * 32 / Bits / scales_shape[1]);
    uint4 words = {w[at * Bits / 4], 0u, 0u, 0u};
    if (Bits == 8) words.y = w[at * 2 + 1];
    const unsigned scale_and_bias = factors[0][group] | unsigned(factors[1][group]) << 16;
    reinterpret_cast<uint4*>(y)[at] = in_order<Bits>(words, 0, scale_and_bias, 0x000f000fu);
"""

_library_call: Any = nn.QuantizedLinear.__call__
_library_as_linear: Any = nn.QuantizedEmbedding.as_linear


def product(module: Any, x: mx.array) -> mx.array:
    """Return x [..., in] times the module's quantized weights: [..., out], without its bias."""
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    if rows >= MANY_ROWS or (rows > few_rows_cuda.MAX_QUANTIZED_ROWS and _is_cheap_to_expand(module, x.dtype)):
        y = flat @ expanded(module, x.dtype).T
    else:
        padded = mx.pad(flat, [(0, TILE - rows), (0, 0)]) if rows < TILE else flat
        y = mx.quantized_matmul(padded, *_arrays(module), transpose=True, **_form(module))[:rows]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _is_cheap_to_expand(module: Any, dtype: mx.Dtype) -> bool:
    weight = _weight(module, dtype)
    return weight is not None and weight.num_outputs < few_rows_cuda.MANY_OUTPUTS


def _weight(module: Any, dtype: mx.Dtype) -> Weight | None:
    """Return the module's weight; None unless the kernel that expands weights is installed and has its form."""
    weight = Weight.of(module)
    if weight is None or weight.dtype != dtype or dtype not in NAMES or not few_rows_cuda.is_installed():
        return None
    return weight


def most_expanded_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's largest weights that are expanded for fewer than MANY_ROWS rows; 0: it has none."""
    quantized = [module for module in model.modules() if "scales" in module]
    expanded = [module for module in quantized if _is_cheap_to_expand(module, module.scales.dtype)]
    return max((module.weight.size * 32 // module.bits * module.scales.itemsize for module in expanded), default=0)


def expanded(module: Any, dtype: mx.Dtype) -> mx.array:
    """Return the numbers [out, in] of the module's quantized weights, by a kernel if it is installed and has the form.

    The library's own takes three times as long.
    """
    if (weight := _weight(module, dtype)) is None:
        return mx.dequantize(*_arrays(module), **_form(module), dtype=dtype)
    num_outputs, num_words = weight.arrays[0].shape
    num_columns = num_words * 32 // weight.bits
    (numbers,) = _expansion(dtype)(
        inputs=list(weight.arrays),
        template=[("T", dtype), ("Bits", weight.bits)],
        grid=(-(-num_outputs * num_columns // (8 * THREADS)) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_outputs, num_columns)],
        output_dtypes=[dtype],
    )
    return numbers


@cache
def _expansion(dtype: mx.Dtype) -> CudaKernel:
    return CudaKernel(
        name=f"expanded_{NAMES[dtype]}",
        input_names=["w", "scales", "biases"],
        output_names=["y"],
        header=header(dtype),
        source=short(_EXPANSION),
    )


def _arrays(module: Any) -> tuple[Any, ...]:
    return module["weight"], module["scales"], module.get("biases")


def _form(module: Any) -> dict[str, Any]:
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def _few_rows(self: Any, x: mx.array) -> mx.array | None:
    """Return x times the module's weights, without its bias, by the kernel for few rows; None if it does not apply."""
    weight = Weight.of(self)
    if weight is None or not few_rows_cuda.is_installed() or not few_rows_cuda.is_supported(x, weight):
        return None
    return few_rows_cuda.product(x, weight)


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.QuantizedLinear.__call__`."""
    if (y := _few_rows(self, x)) is None:
        if x.size <= FEW_ROWS * x.shape[-1]:
            return _library_call(self, x)
        y = product(self, x)
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.QuantizedEmbedding.as_linear`."""
    if (y := _few_rows(self, x)) is not None:
        return y
    return _library_as_linear(self, x) if x.size <= FEW_ROWS * x.shape[-1] else product(self, x)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    nn.QuantizedLinear.__call__ = linear
    nn.QuantizedEmbedding.as_linear = as_linear
