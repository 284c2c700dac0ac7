"""MolmoTower: Molmo's vision tower, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.molmo.vision import pad_to_multiple

from engine.processing.pooled_patches import pooled_patches
from engine.worker.vision_tower import PROBE_TILES, Grid, TowerState


class MolmoTower:
    """A tower on a square and overlapping crops, whose features are hidden states of several blocks.

    Learned vectors are added to the features of patches in the padding, of all and of a part of one. Attention of a
    square of patches to itself makes one token of them, and its query is their mean.
    """

    def __init__(self, module: Any):
        self._vision = module.vision_tower
        self._config, self._vit = self._vision.config, self._vision.image_vit
        self._blocks = self._vit.transformer.resblocks
        self._layers = [layer % len(self._blocks) for layer in self._config.vit_layers]
        self.num_blocks, self.patch_size = max(self._layers) + 1, self._config.image_patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tiles, rows, columns = grid
        dtype = self._vit.positional_embedding.dtype  # that of the embedding may be the one of packed weights
        patches = pixels.transpose(0, 2, 3, 1).reshape(tiles, rows * columns, -1).astype(dtype)
        embedded = self._vit.patch_embedding(pad_to_multiple(patches, self._config.intermediate_size))
        of_class = mx.broadcast_to(self._vit.class_embedding, (tiles, 1, embedded.shape[-1]))
        placed = self._vit.add_pos_emb(mx.concatenate([of_class, embedded], axis=1), (rows, columns))
        hidden = self._vit.pre_ln(placed)
        # placeholders, so that `arrays` has its final number from the first block
        return TowerState(hidden, grid, taken=[hidden] * len(self._layers))

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._blocks[index](state.hidden)
        for i, layer in enumerate(self._layers):
            if layer == index:
                state.taken[i] = state.hidden

    def finish(self, state: TowerState) -> mx.array:
        tiles, side, _ = state.grid
        crops = state.tiles if any(state.tiles) else (1, tiles - 1)  # a probe has no tiles, overlap or padding
        unpadded = state.unpadded if any(state.unpadded) else (crops[0] * side, crops[1] * side)
        inner = state.inner if any(state.inner) else (unpadded[0] * self.patch_size, unpadded[1] * self.patch_size)
        features = mx.concatenate(state.taken, axis=-1)[:, 1:]
        shares = mx.array(_shares(side, crops, unpadded, inner, self.patch_size))[..., None]
        is_padding = shares == 0
        for vector, is_meant in zip(self._vision.pad_embed, (is_padding, (shares < 1) & ~is_padding), strict=True):
            features = features + vector * is_meant.astype(features.dtype)
        squares = mx.array(pooled_patches(side, crops, unpadded))
        patches = features.reshape(-1, features.shape[-1])[squares]
        pooled = self._vision.image_pooling_2d(patches.mean(axis=-2, keepdims=True), patches)
        return self._vision.image_projector(pooled[:, 0])

    def probe_grids(self) -> list[Grid]:
        rows, columns = self._config.image_num_patch
        return [(num_tiles + 1, rows, columns) for num_tiles in PROBE_TILES]


def _shares(
    side: int, crops: tuple[int, int], unpadded: tuple[int, int], inner: tuple[int, int], patch_size: int
) -> np.ndarray:
    """Return how much of each patch is no padding, as the model was trained with it, float32 [views, side * side].

    Those of the first crop count for the square, those of each next crop for the one before it, and -1 for the last:
    the published processor has the square first among the views, but appends -1 for it to the shares of the crops.

    Args:
        side: Patches along each side of a crop.
        crops: Along height and width.
        unpadded: Patches of all crops together, without those in which they overlap, likewise.
        inner: Pixels of the image within the padding, likewise.
        patch_size: Pixels along each side of a patch.
    """
    of_rows, of_columns = (_covered(*lengths, patch_size) for lengths in zip(unpadded, inner, strict=True))
    whole = np.outer(of_rows, of_columns)
    tops, lefts = (
        [i * (length - side) // max(number - 1, 1) for i in range(number)]
        for length, number in zip(unpadded, crops, strict=True)
    )
    shares = [whole[top : top + side, left : left + side].reshape(-1) for top in tops for left in lefts]
    return np.stack([*shares, np.full(side**2, -1.0)]).astype(np.float32)


def _covered(num_patches: int, num_pixels: int, patch_size: int) -> np.ndarray:
    """Return how much of each patch along one side is within the image in the middle, float64 [num_patches]."""
    begin = (num_patches * patch_size - num_pixels) // 2
    edges = np.clip(np.arange(num_patches + 1) * patch_size - begin, 0, num_pixels)
    return np.diff(edges) / patch_size
