"""The choice of the kernel that multiplies many rows by quantized weights on CUDA."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from engine.worker.patches import row_tiles_kernel, warpgroup_kernel

ROW_TILES = row_tiles_kernel.ROW_TILES
"""Most row tiles of a block of either kernel, of 16 rows each."""
HOPPER = 9
"""The compute capability of GPUs whose warpgroups multiply matrices; later ones do it by other instructions."""
PROCESSORS = 132
"""Multiprocessors of an H200. A row's result does not depend on it."""
WARPGROUP_BITS = 4
"""Bits of the weights that warpgroups multiply by."""
_WARPGROUP_FUNCTIONS = row_tiles_kernel.HEADER + warpgroup_kernel.HEADER


class Tiling(NamedTuple):
    """A kernel, and what a block of it computes.

    Attributes:
        name: The kernel's name.
        functions: Source of the functions that it calls.
        source: Its body.
        constants: Names and values of its constants, beside those of all kernels.
        num_outputs: Outputs of a block, of gate and up together.
        shared_bytes: Bytes of a block's shared memory.
    """

    name: str
    functions: str
    source: str
    constants: tuple[tuple[str, int], ...]
    num_outputs: int
    shared_bytes: int


def of_weights(bits: int, num_outputs: int, is_gated: bool) -> Tiling:
    """Return the kernel that multiplies all rows by weights of some bits, with so many outputs in all.

    Small blocks compute outputs for which an H200 has enough of them at once: with larger ones many processors would
    have none. Those of a gate have middle ones (tests/benchmarks/README.md). Clusters of blocks that share the columns
    are faster yet, but MLX 0.32.4 puts new kernels into the graphs of old ones, and CUDA keeps the clusters of those
    (`subgraph_to_key` in mlx/backend/cuda/device.cpp): results were wrong.
    """
    small = row_tiles_kernel.SMALL
    if num_outputs <= PROCESSORS * small.per_processor * small.num_outputs:
        return row_tiles(bits, small)
    return row_tiles(bits, row_tiles_kernel.MIDDLE if is_gated else row_tiles_kernel.LARGE)


def row_tiles(bits: int, block: row_tiles_kernel.Block = row_tiles_kernel.LARGE) -> Tiling:
    """Return the kernel for weights of some bits that all devices have, with blocks of one form."""
    source, num_outputs = row_tiles_kernel.SOURCE, block.num_outputs
    return Tiling("row_tiles", block.header, source, block.constants, num_outputs, block.shared_bytes(bits))


def of_experts(bits: int) -> Tiling:
    """Return the kernel for experts' weights of some bits: that of Hopper GPUs, on these and if it has their form.

    Weights that all rows are multiplied by have `row_tiles`: with 64 rows a step of 64 layers took 80 ms with Hopper's
    kernel and 55 with row tiles. Blocks of Hopper's kernel have 256 outputs, so that 20 of them compute 5,120.
    """
    if bits != WARPGROUP_BITS or not has_warpgroups():
        return row_tiles(bits)
    kernel = warpgroup_kernel
    return Tiling(
        "warpgroups",
        _WARPGROUP_FUNCTIONS,
        kernel.SOURCE,
        kernel.CONSTANTS,
        kernel.OUTPUTS,
        kernel.SHARED_BYTES,
    )


@cache
def has_warpgroups() -> bool:
    """Return whether the device's warpgroups multiply matrices as those of Hopper GPUs do.

    It is asked once, as MLX asks the driver each time for all that it knows of the device.
    """
    return int(mx.device_info().get("compute_capability_major", 0)) == HOPPER
