"""Products of decode steps on a CPU: each on two cores, and without the copy of the weights that OpenBLAS makes.

A decode step on a CPU reads all weights, and one core cannot use the memory's whole bandwidth. OpenBLAS's own threads
wait for each other actively at each product: if another process takes one of the two cores for a moment, a product of
0.3 ms takes 8 (see blas.py). So a large product is computed in halves by two MLX streams, each a thread of its own; an
interruption costs what it lasts.

For more than one row OpenBLAS copies ("packs") the weights before it multiplies, which takes longer than the product
itself. Its kernels for small matrices, which exist for AVX-512, do not: the weights are multiplied in tiles of such a
size. A half is one operation of MLX, which calls OpenBLAS once per tile.

Only float32 products on a CPU of two or three cores: with more, a step's products have several BLAS threads, which two
streams have not been measured against. Prompts are computed by whole weights on all cores.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.worker import blas

MIN_SIZE = 3 * 2**18
"""Smaller weights are not split, as the streams wait for each other at each product."""
MIN_TILED_SIZE = 2**16
"""Smaller weights are not computed in tiles."""
MAX_ROWS, MAX_TOKENS = 64, 8
"""Rows of a product, and tokens of each sequence, up to which it counts as one of a decode step."""
TILES = (64, 48, 32, 24, 16)
"""Rows of the weights in a tile, the best first."""
MAX_TILE_OUTPUTS, MAX_TILE_PRODUCTS = 1200, 10**6
"""Largest matrices for which OpenBLAS 0.3.34 uses its kernels for small matrices: results, and multiplications."""


class _Parts:
    """A weight [N, K] in parts along N, which are views of its memory.

    Args:
        weight: The weight.
        second: The stream that computes its second half; None: it is one part.
    """

    def __init__(self, weight: mx.array, second: mx.Stream | None):
        most = TILES[0] if weight.shape[0] >= 2 * TILES[0] else 1
        middle = weight.shape[0] // 2 // most * most
        self._second = second
        self._weights = [weight] if second is None else [weight[:middle], weight[middle:]]
        mx.eval(self._weights)

    def product(self, x: mx.array) -> mx.array:
        """Return x [..., K] times the transposed weight, [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        results = [_product(rows, self._weights[0], mx.default_stream(mx.default_device()))]
        if self._second is not None:
            results.append(_product(rows, self._weights[1], self._second))
        return mx.concatenate(results, axis=1).reshape(*x.shape[:-1], -1)


def _product(rows: mx.array, weight: mx.array, stream: mx.Stream) -> mx.array:
    """Return rows [M, K] times the transposed weight [N, K] on a stream, in tiles if there are kernels for them."""
    (num_rows, num_inputs), num_outputs = rows.shape, weight.shape[0]
    tile = _tile(num_rows, num_outputs, num_inputs)
    if tile is None:
        return mx.matmul(rows, mx.swapaxes(weight, 0, 1, stream=stream), stream=stream)
    tiles = mx.reshape(weight, (num_outputs // tile, tile, num_inputs), stream=stream)
    results = mx.matmul(rows[None], mx.swapaxes(tiles, 1, 2, stream=stream), stream=stream)
    return mx.reshape(mx.swapaxes(results, 0, 1, stream=stream), (num_rows, num_outputs), stream=stream)


def _tile(num_rows: int, num_outputs: int, num_inputs: int) -> int | None:
    """Return the number of the weight's rows in a tile; None for the product as a whole."""
    if num_rows == 1 or not blas.has_small_kernels():
        return None  # a product of one row copies nothing
    for tile in TILES:
        is_small = tile * num_rows <= MAX_TILE_OUTPUTS and tile * num_rows * num_inputs <= MAX_TILE_PRODUCTS
        if is_small and num_outputs % tile == 0:
            return tile
    return None


def _is_step(x: mx.array) -> bool:
    """Return whether x [..., L, K] has the few tokens per sequence of a decode step."""
    num_tokens = x.shape[-2] if x.ndim > 2 else 1
    return num_tokens <= MAX_TOKENS and x.size <= MAX_ROWS * x.shape[-1] and x.dtype == mx.float32


class SplitLinear(nn.Linear):
    """A linear layer that computes few rows in parts."""

    parts: _Parts

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_step(x):
            return super().__call__(x)
        y = self.parts.product(x)
        return y + self.bias if "bias" in self else y


class SplitEmbedding(nn.Embedding):
    """An embedding that computes few rows in parts where it is the output layer."""

    parts: _Parts

    def as_linear(self, x: mx.array) -> mx.array:
        return self.parts.product(x) if _is_step(x) else super().as_linear(x)


_IN_PARTS: dict[type, type] = {nn.Linear: SplitLinear, nn.Embedding: SplitEmbedding}


def install(*models: nn.Module | None, min_size: int = MIN_SIZE) -> int:
    """Compute few rows of float32 weights in parts, in models that are computed on a CPU of two or three cores.

    Only the calling thread can compute with the models from then on, as MLX's streams belong to the thread that has
    made them.

    Args:
        models: Loaded models; None is ignored.
        min_size: Fewest numbers in a weight whose products two streams compute.

    Returns:
        The number of weights that two streams compute.
    """
    weights = [module for model in models if model is not None for module in _float32_weights(model)]
    split = [module for module in weights if module.weight.size >= min_size]
    tiled = [module for module in weights if min_size > module.weight.size >= MIN_TILED_SIZE]
    if split:
        stream = mx.new_stream(mx.default_device())
        for module in split:
            _compute_in(module, _Parts(module.weight, stream))
    if blas.has_small_kernels():
        for module in tiled:
            _compute_in(module, _Parts(module.weight, None))
    return len(split)


def _float32_weights(model: nn.Module) -> Iterator[Any]:
    for _, module in model.named_modules():
        if type(module) in _IN_PARTS and module.weight.dtype == mx.float32:
            yield module


def _compute_in(module: Any, parts: _Parts) -> None:
    object.__setattr__(module, "parts", parts)  # not among its parameters
    module.__class__ = _IN_PARTS[type(module)]
