"""Vision towers that take images of any shape, and the tower of each family. See vision_tower.py."""

from typing import Any

import mlx.core as mx
import numpy as np

from engine.worker import square_towers
from engine.worker.deepseek_vl2_tower import DeepseekVL2Tower
from engine.worker.gemma4_tower import Gemma4Tower
from engine.worker.kimi_k25_tower import KimiK25Tower
from engine.worker.lfm2_tower import Lfm2Tower
from engine.worker.llama4_tower import Llama4Tower
from engine.worker.molmo2_tower import Molmo2Tower
from engine.worker.molmo_tower import MolmoTower
from engine.worker.moonvit_tower import MoonViTTower
from engine.worker.phi3v_tower import Phi3VTower
from engine.worker.phi4_tower import Phi4Tower
from engine.worker.view_towers import DeepseekOCR2Tower, DeepseekOCRTower
from engine.worker.vision_tower import Grid, TowerState, VisionTower, filled_frames, frame_bounds, frames, square_grids


class QwenTower:
    """Qwen3-VL's and Qwen3.5's tower: learned positions, interpolated, and rotary ones; deepstack features."""

    def __init__(self, module: Any):
        self._tower = module.vision_tower
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_embed.patch_size
        self._deepstack = dict(
            zip(self._tower.deepstack_visual_indexes, self._tower.deepstack_merger_list, strict=True)
        )

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, grids = self._tower, mx.array([grid], mx.int32)
        hidden = tower.patch_embed(filled_frames(pixels, tower.patch_embed))
        fixed = tower.rot_pos_emb(grids), frame_bounds(grid)
        return TowerState(hidden + tower.fast_pos_embed_interpolate(grids), grid, fixed)

    def run_block(self, index: int, state: TowerState) -> None:
        rotary, bounds = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)
        if index in self._deepstack:
            state.deepstack.append(self._deepstack[index](state.hidden))

    def finish(self, state: TowerState) -> mx.array:
        features = self._tower.merger(state.hidden)
        return mx.concatenate([features, *state.deepstack], axis=-1) if state.deepstack else features

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.spatial_merge_size)


class Qwen2Tower:
    """Qwen2-VL's tower: rotary positions alone."""

    def __init__(self, module: Any):
        self._tower = module.vision_tower
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_embed.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower = self._tower
        hidden = tower.patch_embed(filled_frames(pixels, tower.patch_embed))
        return TowerState(hidden, grid, (tower.rot_pos_emb(mx.array([grid], mx.int32)), frame_bounds(grid)))

    def run_block(self, index: int, state: TowerState) -> None:
        rotary, bounds = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)

    def finish(self, state: TowerState) -> mx.array:
        return self._tower.merger(state.hidden)

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.spatial_merge_size)


class WindowTower(Qwen2Tower):
    """Qwen2.5-VL's tower: most blocks attend within windows, whose patches follow each other between the blocks."""

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        state = super().begin(pixels, grid)
        rotary, bounds = state.fixed
        order, window_bounds = self._tower.get_window_index(mx.array([grid], mx.int32))
        window_bounds = mx.array(np.unique(np.array(window_bounds)).astype(np.int32))  # empty windows repeat one
        state.hidden = self._in_order(state.hidden, order)
        state.fixed = (self._in_order(rotary, order), bounds, window_bounds, order)
        return state

    def run_block(self, index: int, state: TowerState) -> None:
        rotary, bounds, window_bounds, _ = state.fixed
        sees_all = index in self._tower.fullatt_block_indexes
        block, bounds = self._tower.blocks[index], bounds if sees_all else window_bounds
        state.hidden = block(state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)

    def finish(self, state: TowerState) -> mx.array:
        return super().finish(state)[mx.argsort(state.fixed[3], axis=0)]

    def _in_order(self, patches: mx.array, order: mx.array) -> mx.array:
        """Reorder patches [n, width] by tokens. order: the tokens of the first window, then those of the next .."""
        tokens = patches.reshape(-1, self._tower.spatial_merge_unit, patches.shape[-1])
        return tokens[order].reshape(patches.shape)


class GlmOcrTower:
    """GLM-OCR's tower: rotary positions alone; patches of a square are merged by a convolution."""

    def __init__(self, module: Any):
        self._tower = module.vision_tower
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower = self._tower
        hidden = tower.patch_embed(filled_frames(pixels, tower.patch_embed))
        angles, _ = tower.rot_pos_emb(mx.array([grid], mx.int32))
        return TowerState(hidden, grid, (frame_bounds(grid), *angles))

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, *angles = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, position_embeddings=tuple(angles))

    def finish(self, state: TowerState) -> mx.array:
        tower, side = self._tower, self._tower.spatial_merge_size
        squares = tower.post_layernorm(state.hidden).reshape(-1, side, side, state.hidden.shape[-1])
        merged = tower.downsample(squares)
        return tower.merger(merged.reshape(-1, merged.shape[-1]))

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.spatial_merge_size)


class GlmTower(GlmOcrTower):
    """GLM-4.1V's tower: learned positions, interpolated, and rotary ones."""

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, grids = self._tower, mx.array([grid], mx.int32)
        hidden = tower.post_conv_layernorm(tower.patch_embed(filled_frames(pixels, tower.patch_embed)))
        rotary, places = tower.rot_pos_emb(grids)
        hidden = tower.embeddings(hidden, [len(hidden)], grids, places[:, 0], places[:, 1])
        return TowerState(hidden, grid, (frame_bounds(grid), rotary))

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, rotary = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)


class DotsTower:
    """dots.ocr's tower: rotary positions alone."""

    def __init__(self, module: Any):
        self._tower = module.vision_tower
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.config.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, patchifier = self._tower, self._tower.patch_embed.patchifier
        slices = mx.repeat(pixels[:, :, None], patchifier.temporal_patch_size, axis=2)
        hidden = tower.patch_embed(slices.astype(patchifier.proj.weight.dtype))
        return TowerState(hidden, grid, (frame_bounds(grid), tower.rot_pos_emb(mx.array([grid], mx.int32))))

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, rotary = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)

    def finish(self, state: TowerState) -> mx.array:
        tower = self._tower
        return tower.merger(tower.post_trunk_norm(state.hidden) if tower.config.post_norm else state.hidden)

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.spatial_merge_size)


class PaddleOCRTower:
    """PaddleOCR-VL's tower: learned positions, interpolated, and rotary ones, of patches row by row."""

    def __init__(self, module: Any):
        self._tower = module.visual
        self.num_blocks, self.patch_size = len(self._tower.layers), self._tower.config.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, grids = self._tower, mx.array([grid], mx.int32)
        pixels = pixels.astype(tower.embeddings.patch_embedding.weight.dtype)
        fixed = frame_bounds(grid), tower.rot_pos_emb(grids)
        return TowerState(tower.embeddings(pixels[None], grids), grid, fixed)

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, rotary = state.fixed
        state.hidden = self._tower.layers[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)

    def finish(self, state: TowerState) -> mx.array:
        tower = self._tower
        return tower.projector(tower.post_layernorm(state.hidden), mx.array([state.grid], mx.int32))

    def probe_grids(self) -> list[Grid]:
        return square_grids(self._tower.config.spatial_merge_size)


class PixtralTower:
    """Pixtral's tower: images of any shape, two rotary positions per patch; a patch is a token."""

    merge_size = 1

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower.vision_model
        layer, self._layers = module.vision_feature_layer, self._vision.transformer.layers
        self.num_blocks = layer if layer >= 0 else len(self._layers) + 1 + layer
        self.patch_size = self._vision.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        vision, (_, rows, columns) = self._vision, grid
        embedded = vision.patch_conv(frames(pixels, grid, vision.patch_conv.weight.dtype))
        hidden = vision.ln_pre(embedded.reshape(1, rows * columns, -1))
        per_row = vision.config.image_size // vision.config.patch_size
        places = (mx.arange(rows)[:, None] * per_row + mx.arange(columns)[None]).reshape(-1)
        return TowerState(hidden, grid, vision.patch_positional_embedding(hidden, places))

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._layers[index](state.hidden, position_embeddings=state.fixed, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        return self._module.multi_modal_projector(state.hidden[0])

    def probe_grids(self) -> list[Grid]:
        return square_grids(self.merge_size)


class Mistral3Tower(PixtralTower):
    """Pixtral's tower; patches of a square share a token."""

    def __init__(self, module: Any):
        super().__init__(module)
        self.merge_size = module.config.spatial_merge_size

    def finish(self, state: TowerState) -> mx.array:
        _, rows, columns = state.grid
        size = rows * self.patch_size, columns * self.patch_size
        return self._module.multi_modal_projector(state.hidden[0], [size])


TOWERS: dict[str, type[VisionTower]] = {
    "aya_vision": square_towers.AyaVisionTower,
    "deepseek_vl_v2": DeepseekVL2Tower,
    "deepseekocr": DeepseekOCRTower,
    "deepseekocr_2": DeepseekOCR2Tower,
    "dots_ocr": DotsTower,
    "gemma3": square_towers.Gemma3Tower,
    "gemma4": Gemma4Tower,
    "glm4v": GlmTower,
    "glm4v_moe": GlmTower,
    "glm_ocr": GlmOcrTower,
    "idefics3": square_towers.Idefics3Tower,
    "internvl": square_towers.InternVLTower,
    "internvl_chat": square_towers.InternVLChatTower,
    "kimi_k25": KimiK25Tower,
    "kimi_vl": MoonViTTower,
    "lfm2-vl": Lfm2Tower,
    "lfm2_vl": Lfm2Tower,
    "llama4": Llama4Tower,
    "llava": square_towers.LlavaTower,
    "llava_next": square_towers.LlavaNextTower,
    "llava_onevision": square_towers.OnevisionTower,
    "mistral3": Mistral3Tower,
    "molmo": MolmoTower,
    "molmo2": Molmo2Tower,
    "paddleocr_vl": PaddleOCRTower,
    "paligemma": square_towers.PaliGemmaTower,
    "phi3_v": Phi3VTower,
    "phi4-siglip": Phi4Tower,
    "pixtral": PixtralTower,
    "smolvlm": square_towers.Idefics3Tower,
    "qwen2_vl": Qwen2Tower,
    "qwen2_5_vl": WindowTower,
    "qwen3_5": QwenTower,
    "qwen3_5_moe": QwenTower,
    "qwen3_vl": QwenTower,
    "qwen3_vl_moe": QwenTower,
}
"""By the model_type of config.json; those of engine/processing/vision_family.py."""


def make_tower(module: Any, model_type: str, has_crops: bool = False) -> VisionTower:
    """Return the tower of a loaded model whose images are supported. has_crops: Gemma 3's pan-and-scan is on."""
    return (square_towers.PanAndScanTower if has_crops else TOWERS[model_type])(module)  # type: ignore[call-arg]
