"""VisionTower: one family's vision tower, computed block by block; follows mlx_vlm 0.7.10's forward of the same model.

A tower is computed in pieces, so that decoding rows wait for a few blocks and not for a whole image.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import pixel_shuffle

Grid = tuple[int, int, int]
"""Frames or tiles, and patches along height and width of each."""


@dataclass(slots=True, eq=False)
class TowerState:
    """An image between two blocks."""

    hidden: mx.array
    """The hidden states of all patches."""
    grid: Grid
    """The image's."""
    fixed: tuple[mx.array, ...] = ()
    """Arrays that every block takes, such as the angles of the positions."""
    deepstack: list[mx.array] = field(default_factory=list)
    """Features [num_tokens, hidden] taken after some of the blocks."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.hidden, *self.fixed, *self.deepstack]


class VisionTower(Protocol):
    """The vision tower of one model.

    Attributes:
        num_blocks: Blocks between `begin` and `finish`.
        patch_size: Pixels per side of a patch.
    """

    num_blocks: int
    patch_size: int

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        """Embed patches.

        Args:
            pixels: float32 [num_patches, channels, patch, patch], normalised, in the order of the model's processor.
            grid: Of the image.
        """
        ...

    def run_block(self, index: int, state: TowerState) -> None:
        """Compute one block, lazily."""
        ...

    def finish(self, state: TowerState) -> mx.array:
        """Return the features [num_tokens, hidden * (1 + num_deepstack)].

        They are the embeddings of the image tokens, and then what is added to their hidden states after each of the
        first layers.
        """
        ...

    def probe_grids(self) -> list[Grid]:
        """Return grids of images of ascending sizes, from which memory costs are solved; one if all have one size."""
        ...


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
        fixed = tower.rot_pos_emb(grids), _bounds(grid)
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
        return _squares(self._tower.spatial_merge_size)


class Qwen2Tower:
    """Qwen2-VL's tower: rotary positions alone."""

    def __init__(self, module: Any):
        self._tower = module.vision_tower
        self.num_blocks, self.patch_size = len(self._tower.blocks), self._tower.patch_embed.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower = self._tower
        hidden = tower.patch_embed(filled_frames(pixels, tower.patch_embed))
        return TowerState(hidden, grid, (tower.rot_pos_emb(mx.array([grid], mx.int32)), _bounds(grid)))

    def run_block(self, index: int, state: TowerState) -> None:
        rotary, bounds = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)

    def finish(self, state: TowerState) -> mx.array:
        return self._tower.merger(state.hidden)

    def probe_grids(self) -> list[Grid]:
        return _squares(self._tower.spatial_merge_size)


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
        return TowerState(hidden, grid, (_bounds(grid), *angles))

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, *angles = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, position_embeddings=tuple(angles))

    def finish(self, state: TowerState) -> mx.array:
        tower, side = self._tower, self._tower.spatial_merge_size
        squares = tower.post_layernorm(state.hidden).reshape(-1, side, side, state.hidden.shape[-1])
        merged = tower.downsample(squares)
        return tower.merger(merged.reshape(-1, merged.shape[-1]))

    def probe_grids(self) -> list[Grid]:
        return _squares(self._tower.spatial_merge_size)


class GlmTower(GlmOcrTower):
    """GLM-4.1V's tower: learned positions, interpolated, and rotary ones."""

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        tower, grids = self._tower, mx.array([grid], mx.int32)
        hidden = tower.post_conv_layernorm(tower.patch_embed(filled_frames(pixels, tower.patch_embed)))
        rotary, places = tower.rot_pos_emb(grids)
        hidden = tower.embeddings(hidden, [len(hidden)], grids, places[:, 0], places[:, 1])
        return TowerState(hidden, grid, (_bounds(grid), rotary))

    def run_block(self, index: int, state: TowerState) -> None:
        bounds, rotary = state.fixed
        state.hidden = self._tower.blocks[index](state.hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)


class Gemma3Tower:
    """SigLIP on one square, pooled to fewer tokens."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower.vision_model
        self.num_blocks, self.patch_size = len(self._vision.encoder.layers), self._vision.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        return TowerState(embeddings(frames(pixels, grid, embeddings.patch_embedding.weight.dtype)), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.encoder.layers[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        features = self._module.multi_modal_projector(self._vision.post_layernorm(state.hidden))
        # The language model scales all embeddings, which image features must undergo without effect
        return features.reshape(-1, features.shape[-1]) / self._module.config.hidden_size**0.5

    def probe_grids(self) -> list[Grid]:
        return [_one_tile(self._vision.embeddings)]


class PanAndScanTower(Gemma3Tower):
    """The same on an image and its crops."""

    def probe_grids(self) -> list[Grid]:
        return _tiles(self._vision.embeddings)


class Idefics3Tower:
    """SigLIP on tiles; patches of a square share a token."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_model
        self.num_blocks, self.patch_size = len(self._vision.encoder.layers), self._vision.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        dtype = embeddings.patch_embedding.weight.dtype
        embedded = embeddings(frames(pixels, grid, dtype), mx.ones(grid, mx.bool_))
        return TowerState(embedded.astype(dtype), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.encoder.layers[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        features = self._module.connector(self._vision.post_layernorm(state.hidden))
        return features.reshape(-1, features.shape[-1])

    def probe_grids(self) -> list[Grid]:
        return _tiles(self._vision.embeddings)


class InternVLTower:
    """A tower with a class token on tiles; patches of a square share a token."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower
        self.num_blocks, self.patch_size = len(self._vision.encoder.layer), self._vision.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        dtype = embeddings.patch_embeddings.projection.weight.dtype
        return TowerState(embeddings(frames(pixels, grid, dtype)), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.encoder.layer[index](state.hidden)

    def finish(self, state: TowerState) -> mx.array:
        shuffled = pixel_shuffle(state.hidden[:, 1:], self._module.config.downsample_ratio)
        features = self._module.multi_modal_projector(shuffled)
        return features.reshape(-1, features.shape[-1])

    def probe_grids(self) -> list[Grid]:
        return _tiles(self._vision.embeddings)


class LlavaTower:
    """CLIP or SigLIP on one square, up to the layer whose hidden states are the features, without the class token."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower.vision_model
        layer, self._layers = module.vision_feature_layer, self._vision.encoder.layers
        self.num_blocks = layer if layer >= 0 else len(self._layers) + 1 + layer
        self.patch_size = self._vision.embeddings.patch_size
        self._is_clip = module.vision_tower.model_type == "clip_vision_model"

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        embedded = embeddings(frames(pixels, grid, embeddings.patch_embedding.weight.dtype))
        return TowerState(self._vision.pre_layrnorm(embedded) if self._is_clip else embedded, grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._layers[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        features = self._module.multi_modal_projector(state.hidden[:, 1:] if self._is_clip else state.hidden)
        return features.reshape(-1, features.shape[-1])

    def probe_grids(self) -> list[Grid]:
        return [_one_tile(self._vision.embeddings)]


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
        return _squares(self.merge_size)


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
    "gemma3": Gemma3Tower,
    "glm4v": GlmTower,
    "glm4v_moe": GlmTower,
    "glm_ocr": GlmOcrTower,
    "idefics3": Idefics3Tower,
    "internvl": InternVLTower,
    "llava": LlavaTower,
    "mistral3": Mistral3Tower,
    "pixtral": PixtralTower,
    "smolvlm": Idefics3Tower,
    "qwen2_vl": Qwen2Tower,
    "qwen2_5_vl": WindowTower,
    "qwen3_5": QwenTower,
    "qwen3_5_moe": QwenTower,
    "qwen3_vl": QwenTower,
    "qwen3_vl_moe": QwenTower,
}
"""By the model_type of config.json; those of engine/processing/vision_family.py."""

PROBE_SIDES = (4, 8, 16)
"""Sides of the probe images of towers that take any size, in image tokens."""
PROBE_TILES = (1, 2, 3)
"""Tiles of the probe images of towers that take tiles of one size."""


def make_tower(module: Any, model_type: str, has_crops: bool = False) -> VisionTower:
    """Return the tower of a loaded model whose images are supported. has_crops: Gemma 3's pan-and-scan is on."""
    return (PanAndScanTower if has_crops else TOWERS[model_type])(module)  # type: ignore[call-arg]


def _one_tile(embeddings: Any) -> Grid:
    side = embeddings.image_size // embeddings.patch_size
    return (1, side, side)


def _tiles(embeddings: Any) -> list[Grid]:
    _, height, width = _one_tile(embeddings)
    return [(num_tiles, height, width) for num_tiles in PROBE_TILES]


def _squares(merge_size: int) -> list[Grid]:
    return [(1, side * merge_size, side * merge_size) for side in PROBE_SIDES]


def _bounds(grid: Grid) -> mx.array:
    """Return where the patches of each frame begin, and the last ones end: int32 [frames + 1]."""
    frames, height, width = grid
    return mx.arange(frames + 1, dtype=mx.int32) * (height * width)


def filled_frames(pixels: mx.array, patch_embed: Any) -> mx.array:
    """Return [n, C * T * p * p]: a still image fills all T temporal slices of a patch; frames have them already."""
    n, channels, height, width = pixels.shape
    if channels == patch_embed.in_channels:
        shape = (n, channels, patch_embed.temporal_patch_size, height, width)
        pixels = mx.broadcast_to(pixels[:, :, None], shape)
    filled = pixels.reshape(n, -1)
    return filled.astype(patch_embed.proj.weight.dtype)


def frames(pixels: mx.array, grid: Grid, dtype: mx.Dtype) -> mx.array:
    """Put patches [n, C, p, p], row by row, together to tiles [tiles, height, width, C], in pixels."""
    tiles, rows, columns = grid
    _, channels, side, _ = pixels.shape
    blocks = pixels.reshape(tiles, rows, columns, channels, side, side).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(tiles, rows * side, columns * side, channels).astype(dtype)
