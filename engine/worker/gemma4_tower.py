"""Gemma4Tower: the vision tower of Gemma 4, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx

from engine.worker.vision_tower import Grid, TowerState, square_grids


class Gemma4Tower:
    """A tower for images of any shape, whose patches have two learned positions and two rotary ones.

    Squares of patches share a token: their mean. The library multiplies positions and means with matrices of zeros and
    ones, one row for each of 10,240 positions; the sums are the same.
    """

    def __init__(self, module: Any):
        self._vision, self._project = module.vision_tower, module.embed_vision
        self._layers = self._vision.encoder.layers
        self._norm = self._layers[0].input_layernorm  # which tells the dtype: weights of products may be packed
        self.num_blocks = len(self._layers)
        self.patch_size = self._vision.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embedder, (_, rows, columns) = self._vision.patch_embedder, grid
        patches = 2 * (pixels.transpose(0, 2, 3, 1).reshape(1, len(pixels), -1) - 0.5)
        hidden = embedder.input_proj(patches.astype(self._norm.weight.dtype))
        x, y = mx.tile(mx.arange(columns), rows), mx.repeat(mx.arange(rows), columns)
        of_x, of_y = embedder.position_embedding_table
        return TowerState(hidden + (of_x[x] + of_y[y]), grid, (mx.stack([x, y], axis=-1)[None],))

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._layers[index](state.hidden, state.fixed[0])

    def finish(self, state: TowerState) -> mx.array:
        vision, (_, rows, columns) = self._vision, state.grid
        hidden, side = state.hidden, vision.pooling_kernel_size
        squares = hidden.reshape(rows // side, side, columns // side, side, -1).astype(mx.float32)
        pooled = squares.mean(axis=(1, 3)).reshape(-1, hidden.shape[-1]).astype(hidden.dtype)
        pooled = pooled * vision.pooler.root_hidden_size
        if vision.config.standardize:
            pooled = (pooled - vision.std_bias) * vision.std_scale
        return self._project(pooled)

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._vision.pooling_kernel_size)
