"""Molmo2Tower: Molmo2's vision tower, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.molmo2.molmo2 import clip_image_features

from engine.processing.pooled_patches import pooled_patches
from engine.worker.vision_tower import PROBE_TILES, Grid, TowerState


class Molmo2Tower:
    """A tower on a square and overlapping crops, whose features are hidden states of several blocks.

    Attention of a square of patches to itself makes one token of them, and its query is their mean. The features are
    added to the embedding of the image token.
    """

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower
        self._vit, self._layers = self._vision.image_vit, self._vision.vit_layers
        self.num_blocks, self.patch_size = max(self._layers) + 1, self._vision.vit_config.image_patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tiles, rows, columns = grid
        patches = pixels.transpose(0, 2, 3, 1).reshape(tiles, rows * columns, -1)
        dtype = self._vit.positional_embedding.dtype  # that of the embedding may be the one of packed weights
        embedded = self._vit.patch_embedding(patches.astype(dtype))
        hidden = self._vit.add_pos_emb(embedded, (rows, columns))
        # placeholders, so that `arrays` has its final number from the first block
        return TowerState(hidden, grid, taken=[hidden] * len(self._layers))

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vit.transformer[index](state.hidden)
        for i, layer in enumerate(self._layers):
            if layer == index:
                state.taken[i] = state.hidden

    def finish(self, state: TowerState) -> mx.array:
        tiles, side, _ = state.grid
        crops = state.tiles if any(state.tiles) else (1, tiles - 1)  # a probe has no tiles, and no overlap
        unpadded = state.unpadded if any(state.unpadded) else (crops[0] * side, crops[1] * side)
        features = mx.concatenate(state.taken, axis=-1)
        squares = mx.array(pooled_patches(side, crops, unpadded))
        pooled = self._pool(features.reshape(-1, features.shape[-1]), squares)
        language_model, image_token = self._module.language_model, mx.array([self._module.config.image_patch_id])
        return language_model.model.wte(image_token) + clip_image_features(self._vision.image_projector(pooled))

    def _pool(self, features: mx.array, squares: mx.array) -> mx.array:
        """Pool features [num_patches, width] to [num_tokens, hidden]. squares: see `pooled_patches`.

        Source: `VisionModel.__call__` of mlx_vlm's Molmo2.
        """
        is_patch = squares >= 0
        patches = features[mx.maximum(squares, 0)] * is_patch[..., None].astype(features.dtype)
        mask, number = None, mx.full((len(squares), 1, 1), squares.shape[1], features.dtype)
        if self._vision.adapter_config.pooling_attention_mask:
            mask, number = is_patch[:, None, None], is_patch.sum(axis=-1)[:, None, None].astype(features.dtype)
        query = patches.sum(axis=-2, keepdims=True) / number
        return self._vision.image_pooling_2d(query, patches, attn_mask=mask)[:, 0]

    def probe_grids(self) -> list[Grid]:
        rows, columns = self._vision.vit_config.image_num_patch
        return [(num_tiles + 1, rows, columns) for num_tiles in PROBE_TILES]
