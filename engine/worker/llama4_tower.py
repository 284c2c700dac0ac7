"""Llama4Tower: the vision tower of Llama 4, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx

from engine.worker.vision_tower import Grid, TowerState, tile_grids


class Llama4Tower:
    """Tiles with a class token behind their patches: learned positions and two rotary ones per patch.

    Patches of a square share a token.
    """

    def __init__(self, module: Any):
        self._vision, self._project = module.vision_model, module.multi_modal_projector
        self.num_blocks, self.patch_size = len(self._vision.model.layers), self._vision.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        vision, (tiles, rows, columns) = self._vision, grid
        dtype = vision.class_embedding.dtype  # that of the linear layer may be the one of packed weights
        embedded = vision.patch_embedding.linear(pixels.reshape(tiles, rows * columns, -1).astype(dtype))
        ends = mx.broadcast_to(vision.class_embedding, (tiles, 1, embedded.shape[-1]))
        hidden = mx.concatenate([embedded, ends], axis=1) + vision.positional_embedding_vlm
        return TowerState(vision.layernorm_pre(hidden), grid, (vision.rotary_embedding.freqs_ci,))

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.model.layers[index](state.hidden, freqs_ci=state.fixed[0])

    def finish(self, state: TowerState) -> mx.array:
        hidden = self._vision.layernorm_post(state.hidden)[:, :-1]
        features = self._project(self._vision.vision_adapter(hidden))
        return features.reshape(-1, features.shape[-1])

    def probe_grids(self) -> list[Grid]:
        return tile_grids(self._vision)
