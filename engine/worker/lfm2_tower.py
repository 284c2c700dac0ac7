"""Lfm2Tower: LFM2-VL's vision tower, computed block by block. See vision_tower.py."""

import math
from typing import Any

import mlx.core as mx

from engine.worker.vision_tower import PROBE_TILES, Grid, TowerState


class Lfm2Tower:
    """SigLIP 2 on an image of any shape, or on tiles and a thumbnail, each of which is an image of its own.

    Patches of a square share a token.
    """

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower
        self._embeddings, self._layers = self._vision.embeddings, self._vision.encoder.layers
        self.num_blocks, self.patch_size = len(self._layers), self._embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        patches = pixels.transpose(0, 2, 3, 1).reshape(len(pixels), -1)
        dtype = self._vision.post_layernorm.weight.dtype  # that of the embedding may be the one of packed weights
        return TowerState(self._embeddings.patch_embedding(patches.astype(dtype)), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        views = self._views(state)
        if not index:  # the shape of a thumbnail is not known before
            found = (interpolated_positions(self._embeddings, *view.shape[1:3]) for view in views)
            views = [view + one.reshape(1, *view.shape[1:]) for view, one in zip(views, found, strict=True)]
        width = state.hidden.shape[-1]
        outputs = [self._layers[index](view.reshape(len(view), -1, width), mask=None) for view in views]
        state.hidden = mx.concatenate([output.reshape(-1, width) for output in outputs])

    def finish(self, state: TowerState) -> mx.array:
        module, features = self._module, []
        for view in self._views(state):
            merged = module.multi_modal_projector(module.pixel_unshuffle(self._vision.post_layernorm(view)))
            features.append(merged.reshape(-1, merged.shape[-1]))
        return mx.concatenate(features)

    def probe_grids(self) -> list[Grid]:
        config = self._module.config
        side = max(config.tile_size // self.patch_size, math.isqrt(config.max_image_tokens) * config.downsample_factor)
        return [(num_tiles, side, side) for num_tiles in PROBE_TILES]

    def _views(self, state: TowerState) -> list[mx.array]:
        """Return the hidden states of the tiles [tiles, height, width, hidden], and of the thumbnail likewise."""
        tiles, height, width = state.grid
        hidden, num_patches = state.hidden, tiles * height * width
        views = [hidden[:num_patches].reshape(tiles, height, width, -1)]
        return [*views, hidden[num_patches:].reshape(1, *state.thumbnail, -1)] if any(state.thumbnail) else views


def interpolated_positions(embeddings: Any, height: int, width: int) -> mx.array:
    """Return SigLIP 2's position embeddings [1, height * width, hidden] of an image with so many patches.

    embeddings: The library's module, whose table may be quantized.
    """
    side = embeddings.position_embedding_size
    table = embeddings.position_embedding(mx.arange(side * side)).reshape(side, side, -1)
    return embeddings.resize_positional_embeddings(table, mx.array([[height, width]]), height * width)
