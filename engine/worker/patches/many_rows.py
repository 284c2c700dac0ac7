"""The choice of the kernel that multiplies many rows by quantized weights on CUDA."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from engine.worker.patches import row_tiles_kernel, warpgroup_kernel

ROW_TILES = row_tiles_kernel.ROW_TILES
"""Most row tiles of a block of either kernel, of 16 rows each."""
HOPPER = 9
"""The compute capability of GPUs whose warpgroups multiply matrices; later ones do it by other instructions. From it on
blocks form clusters."""
PARTS = (1, 2, 4, 8)
"""Blocks that may share the columns of the same outputs; eight is the most that all devices with clusters have."""
PROCESSORS = 132
"""Blocks that a device computes at once, as an H200 does. Of a device with more, some processors have nothing to do."""
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
        parts: Blocks that share the columns of the same outputs.
    """

    name: str
    functions: str
    source: str
    constants: tuple[tuple[str, int], ...]
    num_outputs: int
    shared_bytes: int
    parts: int = 1


def of_weights(bits: int, num_outputs: int, is_gated: bool) -> Tiling:
    """Return the kernel that multiplies all rows by weights of some bits, with so many outputs in all.

    A row's result depends on the blocks that share its columns, and so on the weights, but not on the number of rows.
    """
    if is_gated:
        return row_tiles(bits, row_tiles_kernel.GATED_OUT_TILES, 2 if has_clusters() else 1)
    blocks = -(-num_outputs // row_tiles_kernel.num_outputs(row_tiles_kernel.OUT_TILES))
    fitting = [parts for parts in PARTS if blocks * parts <= PROCESSORS and has_clusters()]
    return row_tiles(bits, parts=max(fitting, default=1))


def row_tiles(bits: int, out_tiles: int = row_tiles_kernel.OUT_TILES, parts: int = 1) -> Tiling:
    """Return the kernel for weights of some bits that all devices have, with so many blocks for the same outputs."""
    kernel = row_tiles_kernel
    return Tiling(
        f"row_tiles_{out_tiles}_{parts}",
        kernel.header(out_tiles, parts),
        kernel.SOURCE,
        kernel.constants(out_tiles, parts),
        kernel.num_outputs(out_tiles),
        kernel.shared_bytes(bits, out_tiles),
        parts,
    )


def of_experts(bits: int) -> Tiling:
    """Return the kernel for experts' weights of some bits: that of Hopper GPUs, on these and if it has their form.

    Weights that all rows are multiplied by have `row_tiles`: with 64 rows a step of 64 layers took 80 ms with Hopper's
    kernel and 55 with that, before blocks shared columns. Its blocks have twice the outputs, and 20 of them compute
    5,120.
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


def has_warpgroups() -> bool:
    """Return whether the device's warpgroups multiply matrices as those of Hopper GPUs do."""
    return _compute_capability() == HOPPER


def has_clusters() -> bool:
    """Return whether blocks of the device can read each other's shared memory."""
    return _compute_capability() >= HOPPER


@cache
def _compute_capability() -> int:
    """Return its first number; asked once, as MLX asks the driver each time for all that it knows of the device."""
    return int(mx.device_info().get("compute_capability_major", 0))
