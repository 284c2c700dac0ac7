"""Phi4Tower: the vision tower of Phi-4-reasoning-vision, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx

from engine.worker.lfm2_tower import interpolated_positions
from engine.worker.vision_tower import Grid, TowerState, square_grids


class Phi4Tower:
    """SigLIP 2 on an image of any shape, without its last layers; a patch is a token."""

    def __init__(self, module: Any):
        vision = module.vision_tower.vision_tower.vision_model
        self._module, self._norm = module, vision.post_layernorm  # which tells the dtype, and is not applied
        self._embeddings, self._layers = vision.embeddings, vision.encoder.layers
        layer = module.config.mm_vision_select_layer
        self.num_blocks = layer if layer >= 0 else len(self._layers) + 1 + layer
        self.patch_size = self._embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        patches = pixels.transpose(0, 2, 3, 1).reshape(1, len(pixels), -1)
        hidden = self._embeddings.patch_embedding(patches.astype(self._norm.weight.dtype))
        return TowerState(hidden + interpolated_positions(self._embeddings, *grid[1:]), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._layers[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        return self._module.mm_projector(state.hidden[0])

    def probe_grids(self) -> list[Grid]:
        return square_grids(merge_size=1)
