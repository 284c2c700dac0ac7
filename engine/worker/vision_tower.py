"""VisionTower: one family's vision tower, computed block by block; follows mlx_vlm 0.7.10's forward of the same model.

A tower is computed in pieces, so that decoding rows wait for a few blocks and not for a whole image.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

Grid = tuple[int, int, int]
"""Frames or tiles, and patches along height and width of each."""


@dataclass(slots=True, eq=False)
class TowerState:
    """An image between two blocks."""

    hidden: mx.array
    """The hidden states of all patches."""
    grid: Grid
    """The image's."""
    fixed: tuple[mx.array, ...] = ()
    """Arrays that every block takes, such as the angles of the positions."""
    deepstack: list[mx.array] = field(default_factory=list)
    """Features [num_tokens, hidden] taken after some of the blocks."""
    taken: list[mx.array] = field(default_factory=list)
    """Hidden states after some of the blocks."""
    tiles: tuple[int, int] = (0, 0)
    """The image's, see ImagePatches."""
    unpadded: tuple[int, int] = (0, 0)
    """The image's, see ImagePatches."""
    thumbnail: tuple[int, int] = (0, 0)
    """The image's, see ImagePatches."""
    inner: tuple[int, int] = (0, 0)
    """The image's, see ImagePatches."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.hidden, *self.fixed, *self.deepstack, *self.taken]


class VisionTower(Protocol):
    """The vision tower of one model.

    Attributes:
        num_blocks: Blocks between `begin` and `finish`.
        patch_size: Pixels per side of a patch.
    """

    num_blocks: int
    patch_size: int

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        """Embed patches.

        Args:
            pixels: float32 [num_patches, channels, patch, patch], normalised, in the order of the model's processor.
            grid: Of the image.
        """
        ...

    def run_block(self, index: int, state: TowerState) -> None:
        """Compute one block, lazily."""
        ...

    def finish(self, state: TowerState) -> mx.array:
        """Return the features [num_tokens, hidden * (1 + num_deepstack)].

        They are the embeddings of the image tokens, and then what is added to their hidden states after each of the
        first layers.
        """
        ...

    def probe_grids(self) -> list[Grid]:
        """Return grids of images of ascending sizes, from which memory costs are solved; one if all have one size."""
        ...


PROBE_SIDES = (4, 8, 16)
"""Sides of the probe images of towers that take any size, in image tokens."""
PROBE_TILES = (1, 2, 3)
"""Tiles of the probe images of towers that take tiles of one size."""


def one_tile(embeddings: Any) -> Grid:
    """Return the grid of a tower that takes one size."""
    side = embeddings.image_size // embeddings.patch_size
    return (1, side, side)


def tile_grids(embeddings: Any) -> list[Grid]:
    """Return the grids of a few tiles, for `probe_grids`."""
    _, height, width = one_tile(embeddings)
    return [(num_tiles, height, width) for num_tiles in PROBE_TILES]


def square_grids(merge_size: int) -> list[Grid]:
    """Return the grids of square images of some sizes, for `probe_grids`."""
    return [(1, side * merge_size, side * merge_size) for side in PROBE_SIDES]


def frame_bounds(grid: Grid) -> mx.array:
    """Return where the patches of each frame begin, and the last ones end: int32 [frames + 1]."""
    frames, height, width = grid
    return mx.arange(frames + 1, dtype=mx.int32) * (height * width)


def filled_frames(pixels: mx.array, patch_embed: Any) -> mx.array:
    """Return [n, C * T * p * p]: a still image fills all T temporal slices of a patch; frames have them already."""
    n, channels, height, width = pixels.shape
    if channels == patch_embed.in_channels:
        shape = (n, channels, patch_embed.temporal_patch_size, height, width)
        pixels = mx.broadcast_to(pixels[:, :, None], shape)
    filled = pixels.reshape(n, -1)
    return filled.astype(patch_embed.proj.weight.dtype)


def frames(pixels: mx.array, grid: Grid, dtype: mx.Dtype) -> mx.array:
    """Put patches [n, C, p, p], row by row, together to tiles [tiles, height, width, C], in pixels."""
    tiles, rows, columns = grid
    _, channels, side, _ = pixels.shape
    blocks = pixels.reshape(tiles, rows, columns, channels, side, side).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(tiles, rows * side, columns * side, channels).astype(dtype)
