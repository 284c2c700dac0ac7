"""MoonViTTower: the vision tower of Kimi-VL, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.kimi_vl.vision import patch_merger

from engine.worker.vision_tower import Grid, TowerState, square_grids


class MoonViTTower:
    """A tower for images of any shape: learned positions, interpolated, and two rotary ones per patch.

    Patches of a square share a token.
    """

    def __init__(self, module: Any):
        self._tower, self._project = module.vision_tower, module.multi_modal_projector
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_embed.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, shape = self._tower, grid[1:]
        patches = pixels.transpose(0, 2, 3, 1).astype(tower.patch_embed.proj.weight.dtype)
        hidden = tower.patch_embed(patches, [shape])
        rope = tower.rope_pos_emb  # for 512 x 512 patches, of which the library computes all
        angles = type(rope)(rope.dim, *shape, rope.theta_base).get_freqs_cis([shape])
        return TowerState(hidden, grid, (angles, mx.ones((1, 1), mx.bool_)))

    def run_block(self, index: int, state: TowerState) -> None:
        angles, sees_all = state.fixed
        block = self._tower.blocks[index]
        state.hidden = block(state.hidden, cu_seqlens=None, rotary_pos_emb=angles, attention_mask=sees_all)

    def finish(self, state: TowerState) -> mx.array:
        tower = self._tower
        squares = patch_merger(tower.final_layernorm(state.hidden), [state.grid[1:]], tower.merge_kernel_size)
        return self._project(squares)

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.merge_kernel_size[0])
