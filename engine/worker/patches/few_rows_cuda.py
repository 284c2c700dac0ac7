"""Products of few rows with weights of 16, 8 and 4 bits on CUDA, by a kernel that is cheap to launch.

MLX 0.32.4 multiplies one row by a kernel of its own, and more rows by cuBLAS: for each product of each step it asks
cuBLAS for an algorithm, and captures the launch as a graph within the step's graph. On an H200 that takes the host
30 us, longer than the device takes to read most weights. This kernel is one node of the step's graph (15 us), and the
result of a row depends on its own values alone, not on the rows beside it, of up to MAX_ROWS (behind a norm with up
to ROWS rows, as more are normalized by the library). It also multiplies the same rows by several weights at once,
normalizes rows of bfloat16 before, computes the gated half of an MLP, and adds a product to something. With 64 rows
it takes the device twice as long as cuBLAS, and steps were slower. Weights of 4 and 8 bits are expanded to 16 in
registers; the library's kernel for several rows takes the device two to seven times as long, except for the output
layer. From 33 to 128 rows they are multiplied by a kernel that shares the rows among its warps
(many_rows.py). It can be removed when the library keeps cuBLAS's choices, or has such a kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.activations import swiglu

from engine.worker.patches import many_rows
from engine.worker.patches.few_rows_kernel import NAMES, Form, kernel_of

MAX_ROWS = 32
"""More rows are multiplied by the library, or by the kernel for many rows if weights are quantized."""
MAX_QUANTIZED_ROWS = 128
"""More rows are multiplied by the library, with quantized weights expanded before (quantized_cuda.py)."""
MANY_OUTPUTS = 65536
"""Weights of 16 bits with at least this many outputs are multiplied by the kernel for at most ROWS rows: reading them
takes longer than launching cuBLAS."""
MAX_SIZE = 2**31
"""The library multiplies by weights with at least this many numbers: the kernel computes their places in 32 bits."""
ROWS, OUTPUTS, COLUMNS = 16, 8, 32
"""A tile's number of rows, of outputs, and of the input's features. The library multiplies inputs whose number of
features is not a multiple of COLUMNS."""
UNQUANTIZED, QUANTIZED_BITS = 16, (4, 8)
"""Bits of the weights' numbers."""
NARROW = 4096
"""Weights of at most this many outputs have blocks of fewer outputs and more warps: otherwise few processors would have
one."""

_library_call: Any = nn.Linear.__call__
_library_as_linear: Any = nn.Embedding.as_linear


class Weight(NamedTuple):
    """A layer's weight.

    Attributes:
        arrays: Numbers of 16 bits [out, in]; or, quantized, uint32 [out, in * bits / 32], and scales and biases
            [out, in / group_size].
        bits: Bits of a number.
    """

    arrays: tuple[mx.array, ...]
    bits: int = UNQUANTIZED

    @classmethod
    def of(cls, layer: Any) -> Self | None:
        """Return the weight of a linear layer or an embedding; None for one that no kernel multiplies by."""
        if type(layer) in (nn.Linear, nn.Embedding):
            return cls((layer.weight,))
        if type(layer) not in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return None
        if layer.mode != "affine" or layer.bits not in QUANTIZED_BITS:
            return None
        return cls((layer.weight, layer.scales, layer.biases), layer.bits)

    @property
    def num_outputs(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def num_inputs(self) -> int:
        numbers = self.arrays[0].shape[1]
        return numbers * 32 // self.bits if self.bits < UNQUANTIZED else numbers

    @property
    def num_groups(self) -> int:
        """Number of scales of an output; 1 if the weight is not quantized."""
        return self.arrays[1].shape[1] if self.bits < UNQUANTIZED else 1

    @property
    def dtype(self) -> mx.Dtype:
        return self.arrays[-1].dtype


def is_supported(x: mx.array, weight: Weight) -> bool:
    """Return whether the kernel computes x [..., in] times the weight; the library names sizes that do not match."""
    size, most = x.shape[-1], MAX_ROWS if weight.bits == UNQUANTIZED else MAX_QUANTIZED_ROWS
    if weight.num_outputs >= MANY_OUTPUTS and weight.bits == UNQUANTIZED:
        most = ROWS
    is_form = x.dtype in NAMES and weight.dtype == x.dtype and size == weight.num_inputs and size % COLUMNS == 0
    return is_form and x.size <= most * size and weight.num_outputs * size < MAX_SIZE


def weights_of_one_kernel(x: mx.array, layers: Sequence[Any]) -> list[Weight] | None:
    """Return the weights of the layers, if the kernel is installed and computes x [..., in] times all at once."""
    if not is_installed() or any("bias" in layer for layer in layers):
        return None
    found = [weight for weight in map(Weight.of, layers) if weight is not None and is_supported(x, weight)]
    are_alike = len({(weight.bits, weight.num_groups) for weight in found}) == 1
    return found if are_alike and len(found) == len(layers) else None


def product(x: mx.array, weight: Weight) -> mx.array:
    """Return x [..., in] times the transposed weight [out, in], x in bfloat16 or float16: [..., out].

    Sums are float32; a quantized weight is expanded to the dtype of x. `is_supported` says which arrays are allowed.
    """
    return _multiply(x, [weight])[0]


def products(layers: Sequence[Any], x: mx.array, norm: Any = None) -> list[mx.array]:
    """Apply up to four layers to x [..., in], by one kernel if all are linear, without a bias, alike and supported.

    Args:
        layers: The layers.
        x: Their input.
        norm: A norm that is applied to x first; None for nothing.
    """
    if (weights := weights_of_one_kernel(x, layers)) is None:
        x = x if norm is None else norm(x)
        return [layer(x) for layer in layers]
    return _multiply(x, weights, norm=norm)


def gated(gate: Any, up: Any, x: mx.array, norm: Any = None) -> mx.array:
    """Return silu(gate(x)) * up(x), by one kernel if both layers are linear, without a bias, alike and supported.

    A `norm` is applied to x first.
    """
    if (weights := weights_of_one_kernel(x, (gate, up))) is None:
        x = x if norm is None else norm(x)
        return swiglu(gate(x), up(x))
    return _multiply(x, weights, form="gated", norm=norm)[0]


def added(to: mx.array, layer: Any, x: mx.array) -> mx.array:
    """Return to [..., out] + layer(x), by one kernel if the layer is linear, without a bias, and supported."""
    weights = weights_of_one_kernel(x, (layer,))
    if weights is None or to.dtype != x.dtype or to.shape[:-1] != x.shape[:-1]:
        return to + layer(x)
    return _multiply(x, weights, to, form="added")[0]


def is_normed_by_kernel(norm: Any, x: mx.array) -> bool:
    """Return whether the kernel applies a norm to x [..., in]: float16 might not hold a value before."""
    is_form = type(norm) is nn.RMSNorm and norm.weight.dtype == x.dtype == mx.bfloat16
    return is_form and x.size <= ROWS * x.shape[-1]


def _tiles(num_outputs: int, num_rows: int, bits: int, form: Form) -> dict[str, int]:
    """Return the output tiles of a block, the number of loads that a warp is ahead, and the number of warps.

    Measured on an H200 with 1, 4, 16 and 32 rows and the weights of Qwen3.5-4B. A row's result depends on the warps
    alone, which depend on the weights alone.
    """
    if num_outputs <= NARROW and form != "gated":  # a gated block has at least one tile of each half
        tiles, ahead, warps = (1, 2, 16) if bits == UNQUANTIZED else (2, 1, 16)
    elif num_outputs >= MANY_OUTPUTS and bits == UNQUANTIZED:
        tiles, ahead, warps = 4, 1, 8
    else:
        tiles, ahead, warps = (2 if num_rows <= ROWS and bits == UNQUANTIZED else 4), 2, 8
    return {"OutTiles": tiles, "Ahead": ahead, "Warps": warps}


def _multiply(
    x: mx.array, weights: Sequence[Weight], *others: mx.array, form: Form = "plain", norm: Any = None
) -> list[mx.array]:
    """Return x [..., in] times each of the transposed weights [out, in], as `products`, `gated` or `added` say."""
    size = x.shape[-1]
    rows, num_outputs = x.size // size, [weight.num_outputs for weight in weights[: 1 if form == "gated" else None]]
    bits, num_products = weights[0].bits, sum(num_outputs) * (2 if form == "gated" else 1)
    eps = None
    if norm is not None and is_normed_by_kernel(norm, x):
        eps, others = norm.eps, (*others, norm.weight)
    elif norm is not None:
        x = norm(x)
    tiling = None
    if rows > MAX_ROWS:
        tiling = many_rows.of_weights(bits, num_products, form == "gated")
        constants, row_tiles, per_block = dict(tiling.constants), many_rows.ROW_TILES, tiling.num_outputs
    else:
        constants, row_tiles = _tiles(num_products, rows, bits, form), -(-rows // ROWS)
        per_block = OUTPUTS * constants["OutTiles"]
    per_block //= 2 if form == "gated" else 1
    return kernel_of(x.dtype, len(weights), bits < UNQUANTIZED, form, eps, tiling=tiling)(
        inputs=[x.reshape(rows, size), *(array for weight in weights for array in weight.arrays), *others],
        template=[("T", x.dtype), ("RowTiles", row_tiles), ("Bits", bits), *constants.items()],
        grid=(
            32 * sum(-(-num // per_block) for num in num_outputs),
            constants["Warps"] * -(-rows // (ROWS * row_tiles)),
            1,
        ),
        threadgroup=(32, constants["Warps"], 1),
        output_shapes=[(*x.shape[:-1], num) for num in num_outputs],
        output_dtypes=[x.dtype] * len(num_outputs),
    )


def linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Linear.__call__`."""
    weight = Weight((self["weight"],))
    if _is_for_library(x, weight):
        return _library_call(self, x)
    y = product(x, weight)
    return y + self["bias"] if "bias" in self else y


def as_linear(self: Any, x: mx.array) -> mx.array:
    """Stand for `nn.Embedding.as_linear`."""
    weight = Weight((self.weight,))
    return _library_as_linear(self, x) if _is_for_library(x, weight) else product(x, weight)


def _is_for_library(x: mx.array, weight: Weight) -> bool:
    """Return whether the library computes the product: also that of one row, unless it gives logits.

    The library has a kernel for one row, which rounds differently: a row's logits must not depend on others.
    """
    return not is_supported(x, weight) or (x.size == x.shape[-1] and weight.num_outputs < MANY_OUTPUTS)


def is_installed() -> bool:
    """Return whether the device has the kernels."""
    return nn.Linear.__call__ is linear


def install() -> None:
    """Replace the library's methods; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        nn.Linear.__call__ = linear
        nn.Embedding.as_linear = as_linear
