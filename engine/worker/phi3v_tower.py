"""Phi3VTower: Phi-3-vision's tower, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx

from engine.worker.cubic_weights import cubic_weights
from engine.worker.vision_tower import Grid, TowerState, frames, tile_grids

MERGE_SIZE = 2
"""Patches per side that share a token."""


class Phi3VTower:
    """CLIP on a square of the whole image and on its tiles.

    The features are hidden states before the last layer, those of a square of patches side by side. Those of the tiles
    form one image again; a learned vector ends each of its rows and of the square's, and another one separates them.
    The library leaves the tiles of a row behind each other, so that its rows of features are not those of the image.

    The first block computes the square and embeds all patches, as `begin` does not know how the tiles are arranged.

    Source: `modeling_phi3_v.py` of the published checkpoints.
    """

    def __init__(self, module: Any):
        self._vision = module.vision_model
        self._clip = self._vision.img_processor.vision_model
        self._layers = self._clip.encoder.layers[:-1]
        self.num_blocks, self.patch_size = 1 + len(self._layers), self._clip.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        return TowerState(frames(pixels, grid, mx.float32), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        if index > 0:
            state.hidden = self._layers[index - 1](state.hidden, mask=None)
            return
        views = mx.concatenate([_square(state.hidden, *_arrangement(state))[None], state.hidden])
        dtype = self._clip.embeddings.patch_embedding.weight.dtype
        state.hidden = self._clip.pre_layrnorm(self._clip.embeddings(views.astype(dtype)))

    def finish(self, state: TowerState) -> mx.array:
        _, rows, columns = state.grid
        height, width = rows // MERGE_SIZE, columns // MERGE_SIZE
        views = state.hidden[:, 1:].reshape(-1, height, MERGE_SIZE, width, MERGE_SIZE, state.hidden.shape[-1])
        views = views.transpose(0, 1, 3, 2, 4, 5).flatten(3)
        tiles = _assembled(views[1:], *_arrangement(state))
        separator = self._vision.glb_GN.reshape(1, -1).astype(views.dtype)
        features = mx.concatenate([self._with_ends(tiles), separator, self._with_ends(views[0])])
        for layer in self._vision.img_projection:
            features = layer(features)
        return features

    def probe_grids(self) -> list[Grid]:
        return tile_grids(self._clip.embeddings)

    def _with_ends(self, features: mx.array) -> mx.array:
        """Return [rows * (columns + 1), width] for [rows, columns, width]: a learned vector ends each row."""
        rows, _, width = features.shape
        ends = mx.broadcast_to(self._vision.sub_GN.reshape(1, 1, -1).astype(features.dtype), (rows, 1, width))
        return mx.concatenate([features, ends], axis=1).reshape(-1, width)


def _arrangement(state: TowerState) -> tuple[int, int]:
    """Return the tiles along height and width; a probe has not said them."""
    return state.tiles if any(state.tiles) else (1, state.grid[0])


def _assembled(tiles: mx.array, rows: int, columns: int) -> mx.array:
    """Return [rows * height, columns * width, channels] for tiles [rows * columns, height, width, channels]."""
    _, height, width, channels = tiles.shape
    whole = tiles.reshape(rows, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    return whole.reshape(rows * height, columns * width, channels)


def _square(tiles: mx.array, rows: int, columns: int) -> mx.array:
    """Reduce the image of some tiles [rows * columns, side, side, channels] to the size of one, as PyTorch would.

    Source: `interpolate` of PyTorch with the mode bicubic, which the published processor uses.
    """
    _, side, _, channels = tiles.shape
    of_rows, of_columns = (mx.array(cubic_weights(number * side, side)) for number in (rows, columns))
    low = of_rows @ _assembled(tiles, rows, columns).flatten(1)
    return of_columns @ low.reshape(side, columns * side, channels)
