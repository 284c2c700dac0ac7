"""DeepSeek-VL2's vision tower: SigLIP on a square and tiles, whose features form one image again."""

from typing import Any

import mlx.core as mx

from engine.worker.vision_tower import Grid, TowerState, frames, one_tile, tile_grids


class DeepseekVL2Tower:
    """SigLIP; patches of a square share a token. Learned vectors end each row and the square of the whole image."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision.vision_tower
        self.num_blocks, self.patch_size = len(self._vision.blocks), self._vision.patch_embed.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        vision = self._vision
        embedded = vision.patch_embed(frames(pixels, grid, vision.patch_embed.proj.weight.dtype))
        return TowerState(vision.norm_pre(embedded + vision.pos_embed), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.blocks[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        features = self._module.projector(self._vision.norm(state.hidden))
        num_views, num_tokens, width = features.shape
        side = int(num_tokens**0.5)
        rows, columns = state.tiles if any(state.tiles) else (1, num_views - 1)  # a probe has no tiles
        square, tiles = features[0], features[1:].reshape(rows, columns, side, side, width)
        whole = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, width)
        separator = self._module.view_separator[None].astype(features.dtype)
        return mx.concatenate([self._with_ends(square.reshape(side, side, width)), separator, self._with_ends(whole)])

    def _with_ends(self, features: mx.array) -> mx.array:
        """Return [rows * (columns + 1), width] for [rows, columns, width]: a learned vector ends each row."""
        rows, _, width = features.shape
        ends = mx.broadcast_to(self._module.image_newline.astype(features.dtype), (rows, 1, width))
        return mx.concatenate([features, ends], axis=1).reshape(-1, width)

    def probe_grids(self) -> list[Grid]:
        embeddings = self._vision.patch_embed
        _, height, width = one_tile(embeddings)
        return [(num_tiles + 1, height, width) for num_tiles, _, _ in tile_grids(embeddings)]
