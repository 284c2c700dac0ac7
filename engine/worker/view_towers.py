"""Vision towers that take a padded square of the whole image and smaller tiles of it. See vision_tower.py."""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.deepseekocr.sam import get_abs_pos_sam

from engine.processing.view_grid import DEEPSEEK_OCR_SIDES, MAX_TILES
from engine.worker.vision_tower import Grid, TowerState, frames

Shape = tuple[int, ...]
"""Number of views of one size, and positions along their axes."""


class DeepseekOCRTower:
    """SAM on the square and on the tiles, then CLIP on what SAM makes of them; both give features of the same places.

    The hidden states of all views are in one array [positions, width], those of the square first. The features of the
    tiles form one image again; a learned vector ends each of its rows and of the square's, and another one the image.
    """

    _merge_size = 4
    """Patches per side that share a position after SAM: its two convolutions have a stride of 2."""

    def __init__(self, module: Any):
        self._module, self._sam, self._clip = module, module.sam_model, module.vision_model
        self._layers = self._clip.transformer.layers
        self.num_blocks = len(self._sam.blocks) + len(self._layers)
        self.patch_size = self._sam.patch_embed.proj.weight.shape[1]
        self._sides = DEEPSEEK_OCR_SIDES

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        # The library's processor rounds pixels to bfloat16, whatever the weights are
        blocks = frames(pixels, grid, mx.bfloat16).astype(self._sam.patch_embed.proj.weight.dtype)
        views = [self._sam.patch_embed(view) for view in self._assembled(blocks)]
        views = [view + get_abs_pos_sam(self._sam.pos_embed, view.shape[1]) for view in views]
        return TowerState(_joined(views), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        num_sam = len(self._sam.blocks)
        if index >= num_sam:
            views = _split(state.hidden, self._with_class(state.grid))
            state.hidden = _joined([self._layers[index - num_sam](view, mask=None) for view in views])
            return
        views = [self._sam.blocks[index](view) for view in _split(state.hidden, self._squares(state.grid, 1))]
        if index == num_sam - 1:
            views = [self._compressed(view) for view in views]
            state.fixed = (_joined(views),)
            views = [self._clip.pre_layrnorm(self._clip.embeddings(view, view)) for view in views]
        state.hidden = _joined(views)

    def finish(self, state: TowerState) -> mx.array:
        of_clip = _split(state.hidden, self._with_class(state.grid))
        of_sam = _split(state.fixed[0], self._squares(state.grid, self._merge_size))
        features = [self._projected(clip, sam) for clip, sam in zip(of_clip, of_sam, strict=True)]
        parts = [self._with_ends(features[0][0]), self._module.view_separator[None]]
        if len(features) > 1:
            num_tiles, side, _, width = features[1].shape
            rows, columns = state.tiles if any(state.tiles) else (1, num_tiles)  # a probe has no tiles
            whole = features[1].reshape(rows, columns, side, side, width).transpose(0, 2, 1, 3, 4)
            parts.insert(0, self._with_ends(whole.reshape(rows * side, columns * side, width)))
        return mx.concatenate([part.astype(features[0].dtype) for part in parts])

    def _projected(self, of_clip: mx.array, of_sam: mx.array) -> mx.array:
        """Return the features [views, rows, columns, hidden] of views of one size."""
        both = mx.concatenate([of_clip[:, 1:], of_sam.flatten(1, 2)], axis=-1)
        return self._module.projector(both).reshape(*of_sam.shape[:3], -1)

    def probe_grids(self) -> list[Grid]:
        sides, num_patches = self._sides, self._sides.block // self.patch_size
        blocks = [sides.square_blocks + num_tiles * sides.tile_blocks for num_tiles in (0, MAX_TILES // 2, MAX_TILES)]
        return [(num_blocks, num_patches, num_patches) for num_blocks in blocks]

    def _assembled(self, blocks: mx.array) -> list[mx.array]:
        """Put blocks [n, side, side, channels] together to the square and the tiles."""
        sides, (_, side, _, channels) = self._sides, blocks.shape
        views = [(blocks[: sides.square_blocks], sides.square // side)]
        if len(blocks) > sides.square_blocks:
            views.append((blocks[sides.square_blocks :], sides.tile // side))
        return [
            part.reshape(-1, count, count, side, side, channels)
            .transpose(0, 1, 3, 2, 4, 5)
            .reshape(-1, count * side, count * side, channels)
            for part, count in views
        ]

    def _squares(self, grid: Grid, merge_size: int) -> list[Shape]:
        """Return the shapes of the views before SAM's convolutions, or after them."""
        sides, factor = self._sides, self.patch_size * merge_size
        num_tiles = (grid[0] - sides.square_blocks) // sides.tile_blocks
        square, tile = sides.square // factor, sides.tile // factor
        return [(1, square, square), *([(num_tiles, tile, tile)] if num_tiles else [])]

    def _with_class(self, grid: Grid) -> list[Shape]:
        """Return the shapes of the views in CLIP, with the class token."""
        return [(count, 1 + rows * columns) for count, rows, columns in self._squares(grid, self._merge_size)]

    def _compressed(self, view: mx.array) -> mx.array:
        for layer in (*self._sam.neck, self._sam.net_2, self._sam.net_3):
            view = layer(view)
        return view

    def _with_ends(self, features: mx.array) -> mx.array:
        """Return [rows * (columns + 1), width] for [rows, columns, width]: a learned vector ends each row."""
        rows, _, width = features.shape
        ends = mx.broadcast_to(self._module.image_newline.astype(features.dtype), (rows, 1, width))
        return mx.concatenate([features, ends], axis=1).reshape(-1, width)


def _joined(views: Sequence[mx.array]) -> mx.array:
    """Return [positions, width], the positions of all views [.., width] behind each other."""
    return mx.concatenate([view.reshape(-1, view.shape[-1]) for view in views])


def _split(joined: mx.array, shapes: Sequence[Shape]) -> list[mx.array]:
    """Return the views that `_joined` put together. shapes: of each, without the width."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = mx.split(joined, ends) if ends else [joined]
    return [part.reshape(*shape, part.shape[-1]) for part, shape in zip(parts, shapes, strict=True)]
