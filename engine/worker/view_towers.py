"""Vision towers that take a padded square of the whole image and smaller tiles of it. See vision_tower.py."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.deepseekocr.sam import get_abs_pos_sam

from engine.processing.view_grid import DEEPSEEK_OCR, DEEPSEEK_OCR_2, ViewSides
from engine.worker.vision_tower import Grid, TowerState, frames

Shape = tuple[int, ...]
"""Number of views, and positions along their axes."""

MERGE_SIZE = 4
"""Patches per side that share a position after SAM: its two convolutions have a stride of 2."""
BLOCKED = -1e9
"""Added to the scores of positions that are not seen."""


class ViewTower(ABC):
    """SAM on the square and on the tiles, then the layers of another encoder on what SAM makes of them.

    The hidden states of all views are in one array [positions, width], those of the square first.

    Args:
        module: The library's model.
        layers: Those of the second encoder.
        sides: The sizes of the views.
        is_batched: Whether the library computes all tiles together, and not one by one, which rounds otherwise.
    """

    def __init__(self, module: Any, layers: Sequence[Any], sides: ViewSides, is_batched: bool):
        self._module, self._sam, self._layers = module, module.sam_model, layers
        self._sides, self._is_batched = sides, is_batched
        self.num_blocks = len(self._sam.blocks) + len(layers)
        self.patch_size = self._sam.patch_embed.proj.weight.shape[1]

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        # The library's processor rounds pixels to bfloat16, whatever the weights are
        blocks = frames(pixels, grid, mx.bfloat16).astype(self._sam.patch_embed.proj.weight.dtype)
        views = [self._sam.patch_embed(view) for view in self._assembled(blocks)]
        views = [view + get_abs_pos_sam(self._sam.pos_embed, view.shape[1]) for view in views]
        return TowerState(_joined(views), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        num_sam = len(self._sam.blocks)
        if index >= num_sam:
            views = self._run_layer(self._layers[index - num_sam], self._encoded_views(state))
        else:
            views = [self._sam.blocks[index](view) for view in _split(state.hidden, self._shapes(state.grid, 1))]
            if index == num_sam - 1:
                views = self._enter([self._compressed(view) for view in views], state)
        state.hidden = _joined(views)

    @abstractmethod
    def finish(self, state: TowerState) -> mx.array: ...

    def probe_grids(self) -> list[Grid]:
        sides, num_patches = self._sides, self._sides.block // self.patch_size
        counts = (0, sides.max_tiles // 2, sides.max_tiles)
        blocks = [sides.square_blocks + num_tiles * sides.tile_blocks for num_tiles in counts]
        return [(num_blocks, num_patches, num_patches) for num_blocks in blocks]

    @abstractmethod
    def _enter(self, views: list[mx.array], state: TowerState) -> list[mx.array]:
        """Return what the first layer of the second encoder takes. views: [n, rows, columns, width], of SAM."""

    @abstractmethod
    def _run_layer(self, layer: Any, views: list[mx.array]) -> list[mx.array]:
        """Compute a layer of the second encoder."""

    @abstractmethod
    def _num_positions(self, num_places: int) -> int:
        """Return the positions of a view in the second encoder. num_places: after SAM."""

    def _encoded_views(self, state: TowerState) -> list[mx.array]:
        """Return the views [n, positions, width] in the second encoder."""
        shapes = self._shapes(state.grid, MERGE_SIZE)
        return _split(state.hidden, [(n, self._num_positions(rows * columns)) for n, rows, columns in shapes])

    def _assembled(self, blocks: mx.array) -> list[mx.array]:
        """Put blocks [n, side, side, channels] together to the square and the tiles."""
        sides = self._sides
        square = _whole(blocks[: sides.square_blocks], sides.square // sides.block)
        if len(blocks) == sides.square_blocks:
            return [square]
        tiles = _whole(blocks[sides.square_blocks :], sides.tile // sides.block)
        return [square, tiles] if self._is_batched else [square, *mx.split(tiles, len(tiles))]

    def _shapes(self, grid: Grid, merge_size: int) -> list[Shape]:
        """Return the shapes of the views. merge_size: 1 before SAM's convolutions, MERGE_SIZE after them."""
        sides, factor = self._sides, self.patch_size * merge_size
        num_tiles = (grid[0] - sides.square_blocks) // sides.tile_blocks
        square, tile = sides.square // factor, sides.tile // factor
        one_by_one = [(1, tile, tile)] * num_tiles
        together = [(num_tiles, tile, tile)] if num_tiles else []
        return [(1, square, square), *(together if self._is_batched else one_by_one)]

    def _compressed(self, view: mx.array) -> mx.array:
        for layer in (*self._sam.neck, self._sam.net_2, self._sam.net_3):
            view = layer(view)
        return view


class DeepseekOCRTower(ViewTower):
    """SAM, then CLIP; both give features of the same places.

    The features of the tiles form one image again; a learned vector ends each of its rows and of the square's, and
    another one the image.
    """

    def __init__(self, module: Any):
        self._clip = module.vision_model
        super().__init__(module, self._clip.transformer.layers, DEEPSEEK_OCR, is_batched=True)

    def finish(self, state: TowerState) -> mx.array:
        of_sam = _split(state.fixed[0], self._shapes(state.grid, MERGE_SIZE))
        pairs = zip(self._encoded_views(state), of_sam, strict=True)
        features = [self._projected(of_clip, of_sam) for of_clip, of_sam in pairs]
        parts = [self._with_ends(features[0][0]), self._module.view_separator[None]]
        if len(features) > 1:
            num_tiles, side, _, width = features[1].shape
            rows, columns = state.tiles if any(state.tiles) else (1, num_tiles)  # a probe has no tiles
            whole = features[1].reshape(rows, columns, side, side, width).transpose(0, 2, 1, 3, 4)
            parts.insert(0, self._with_ends(whole.reshape(rows * side, columns * side, width)))
        return mx.concatenate([part.astype(features[0].dtype) for part in parts])

    def _enter(self, views: list[mx.array], state: TowerState) -> list[mx.array]:
        state.fixed = (_joined(views),)
        return [self._clip.pre_layrnorm(self._clip.embeddings(view, view)) for view in views]

    def _run_layer(self, layer: Any, views: list[mx.array]) -> list[mx.array]:
        return [layer(view, mask=None) for view in views]

    def _num_positions(self, num_places: int) -> int:
        return 1 + num_places  # the class token

    def _projected(self, of_clip: mx.array, of_sam: mx.array) -> mx.array:
        """Return the features [views, rows, columns, hidden] of views of one size."""
        both = mx.concatenate([of_clip[:, 1:], of_sam.flatten(1, 2)], axis=-1)
        return self._module.projector(both).reshape(*of_sam.shape[:3], -1)

    def _with_ends(self, features: mx.array) -> mx.array:
        """Return [rows * (columns + 1), width] for [rows, columns, width]: a learned vector ends each row."""
        rows, _, width = features.shape
        ends = mx.broadcast_to(self._module.image_newline.astype(features.dtype), (rows, 1, width))
        return mx.concatenate([features, ends], axis=1).reshape(-1, width)


class DeepseekOCR2Tower(ViewTower):
    """SAM, then a Qwen2 encoder, which has as many learned queries behind the places of a view; they give the features.

    The features of the tiles follow each other; a learned vector ends the image.
    """

    def __init__(self, module: Any):
        self._encoder = module.vision_model.qwen2_encoder
        super().__init__(module, self._encoder.layers, DEEPSEEK_OCR_2, is_batched=False)

    def finish(self, state: TowerState) -> mx.array:
        views = [self._encoder.norm(view)[:, view.shape[1] // 2 :] for view in self._encoded_views(state)]
        square, *tiles = [self._module.projector(view)[0] for view in views]
        return mx.concatenate([*tiles, square, self._module.view_separator[None].astype(square.dtype)])

    def _enter(self, views: list[mx.array], state: TowerState) -> list[mx.array]:
        queries = {len(one): one[None] for one in (self._encoder.query_1024, self._encoder.query_768)}
        flat = [view.flatten(1, 2) for view in views]
        return [mx.concatenate([view, queries[view.shape[1]]], axis=1) for view in flat]

    def _run_layer(self, layer: Any, views: list[mx.array]) -> list[mx.array]:
        lengths = [view.shape[1] for view in views]
        masks = {length: _query_mask(length // 2, views[0].dtype) for length in set(lengths)}
        return [
            layer(view, attention_mask=masks[length], position_ids=mx.arange(length)[None])
            for view, length in zip(views, lengths, strict=True)
        ]

    def _num_positions(self, num_places: int) -> int:
        return 2 * num_places


def _query_mask(num_queries: int, dtype: mx.Dtype) -> mx.array:
    """Return [1, 1, 2 * num_queries, 2 * num_queries]: places see all places, a query sees them and those before it."""
    positions = mx.arange(2 * num_queries)
    row, column = positions[:, None], positions[None]
    is_seen = (column < num_queries) | ((row >= num_queries) & (column <= row))
    return mx.where(is_seen, 0.0, BLOCKED).astype(dtype)[None, None]


def _whole(blocks: mx.array, num_blocks: int) -> mx.array:
    """Put blocks together to views [n, height, width, channels]. num_blocks: along each side of a view."""
    _, side, _, channels = blocks.shape
    views = blocks.reshape(-1, num_blocks, num_blocks, side, side, channels).transpose(0, 1, 3, 2, 4, 5)
    return views.reshape(-1, num_blocks * side, num_blocks * side, channels)


def _joined(views: Sequence[mx.array]) -> mx.array:
    """Return [positions, width], the positions of all views [.., width] behind each other."""
    return mx.concatenate([view.reshape(-1, view.shape[-1]) for view in views])


def _split(joined: mx.array, shapes: Sequence[Shape]) -> list[mx.array]:
    """Return the views that `_joined` put together. shapes: of each, without the width."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = mx.split(joined, ends) if ends else [joined]
    return [part.reshape(*shape, part.shape[-1]) for part, shape in zip(parts, shapes, strict=True)]
