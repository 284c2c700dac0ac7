"""KimiK25Tower: the vision tower of Kimi K2.5, computed block by block. See vision_tower.py."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.kimi_k25.vision import patch_merger

from engine.worker.moonvit_tower import MoonViTTower
from engine.worker.vision_tower import Grid, TowerState


class KimiK25Tower(MoonViTTower):
    """Kimi-VL's tower in the library's module for images and videos, with a projector of its own."""

    def __init__(self, module: Any):
        self._tower, self._project = module.vision_tower, module.mm_projector
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_embed.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, shape = self._tower, grid[1:]
        patches = pixels.transpose(0, 2, 3, 1).astype(tower.patch_embed.proj.weight.dtype)
        hidden = tower.patch_embed(patches, mx.array([shape]))
        rope = tower.rope_pos_emb  # for 512 x 512 patches, of which the library computes all
        angles = type(rope)(rope.dim, *shape, rope.theta_base).get_freqs_cis(mx.array([shape]))
        return TowerState(hidden, grid, (angles,))

    def run_block(self, index: int, state: TowerState) -> None:
        block, bounds = self._tower.blocks[index], (0, len(state.hidden))
        state.hidden = block(state.hidden, cu_seqlens=bounds, rotary_pos_emb=state.fixed[0])

    def finish(self, state: TowerState) -> mx.array:
        tower, shapes = self._tower, mx.array([state.grid[1:]])
        squares = patch_merger(tower.final_layernorm(state.hidden), shapes, tower.merge_kernel_size)
        return self._project(squares)[0]
