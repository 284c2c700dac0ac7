"""Vision towers that take squares of one size: an image, or its tiles and crops. See vision_tower.py."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import pixel_shuffle
from mlx_vlm.models.interpolate import resize_bilinear

from engine.processing.anyres_grid import reduced
from engine.worker.vision_tower import Grid, TowerState, frames, one_tile, tile_grids


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
        return [one_tile(self._vision.embeddings)]


class PaliGemmaTower:
    """SigLIP on one square; a patch is a token."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower.vision_model
        self.num_blocks, self.patch_size = len(self._vision.encoder.layers), self._vision.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        return TowerState(embeddings(frames(pixels, grid, embeddings.patch_embedding.weight.dtype)), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.encoder.layers[index](state.hidden, mask=None)

    def finish(self, state: TowerState) -> mx.array:
        features = self._module.multi_modal_projector(self._vision.post_layernorm(state.hidden[0]))
        # The language model scales all embeddings, which image features must undergo without effect
        return features / self._module.language_model.config.hidden_size**0.5

    def probe_grids(self) -> list[Grid]:
        return [one_tile(self._vision.embeddings)]


class PanAndScanTower(Gemma3Tower):
    """The same on an image and its crops."""

    def probe_grids(self) -> list[Grid]:
        return tile_grids(self._vision.embeddings)


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
        return tile_grids(self._vision.embeddings)


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
        return tile_grids(self._vision.embeddings)


class InternVLChatTower:
    """The same tower under the names of InternVL's own repositories."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_model
        self.num_blocks, self.patch_size = len(self._vision.encoder.layers), self._vision.embeddings.patch_size

    def begin(self, pixels: mx.array, grid: Grid) -> TowerState:
        embeddings = self._vision.embeddings
        return TowerState(embeddings(frames(pixels, grid, embeddings.patch_embedding.weight.dtype)), grid)

    def run_block(self, index: int, state: TowerState) -> None:
        state.hidden = self._vision.encoder.layers[index](state.hidden)

    def finish(self, state: TowerState) -> mx.array:
        features = pixel_shuffle(state.hidden[:, 1:], self._module.downsample_ratio)
        for layer in self._module.mlp1:
            features = layer(features)
        return features.reshape(-1, features.shape[-1])

    def probe_grids(self) -> list[Grid]:
        return tile_grids(self._vision.embeddings)


class LlavaTower:
    """CLIP or SigLIP on one square, up to the layer whose hidden states are the features, without the class token."""

    def __init__(self, module: Any):
        self._module, self._vision = module, module.vision_tower.vision_model
        layer, self._layers = module.config.vision_feature_layer, self._vision.encoder.layers
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
        features = self._projected(state)
        return features.reshape(-1, features.shape[-1])

    def _projected(self, state: TowerState) -> mx.array:
        return self._module.multi_modal_projector(state.hidden[:, 1:] if self._is_clip else state.hidden)

    def probe_grids(self) -> list[Grid]:
        return [one_tile(self._vision.embeddings)]


class LlavaNextTower(LlavaTower):
    """CLIP on a square and tiles, whose features form one image again, without padding and with an end to each row.

    Source: `pack_image_features` of transformers' LLaVA-NeXT. The library's module gives each image token a whole tile.
    """

    _max_features: int | None = None

    def finish(self, state: TowerState) -> mx.array:
        features = self._projected(state)
        num_tiles, side, _ = state.grid
        rows, columns = state.tiles if any(state.tiles) else (1, num_tiles - 1)  # a probe has no tiles
        height, width = state.unpadded if any(state.unpadded) else (rows * side, columns * side)
        whole = features[1:].reshape(rows, columns, side, side, -1).transpose(0, 2, 1, 3, 4)
        whole = whole.reshape(rows * side, columns * side, -1)
        top, left = (rows * side - height) // 2, (columns * side - width) // 2
        whole = whole[top : top + height, left : left + width]
        size = reduced((height, width), side, self._max_features)
        if size != (height, width):
            whole = resize_bilinear(whole, size, antialias=False)
        ends = mx.broadcast_to(self._module.image_newline.astype(whole.dtype), (size[0], 1, whole.shape[-1]))
        packed = mx.concatenate([whole, ends], axis=1)
        return mx.concatenate([features[0], packed.reshape(-1, packed.shape[-1])])

    def probe_grids(self) -> list[Grid]:
        embeddings = self._vision.embeddings
        _, height, width = one_tile(embeddings)
        return [(num_tiles + 1, height, width) for num_tiles, _, _ in tile_grids(embeddings)]


class OnevisionTower(LlavaNextTower):
    """SigLIP likewise; more features than `vision_aspect_ratio` allows are reduced.

    The library rounds sizes without padding otherwise than transformers, whose number of tokens this has.
    """

    def __init__(self, module: Any):
        super().__init__(module)
        self._max_features = int(module.config.vision_aspect_ratio.removeprefix("anyres_max_"))


class AyaVisionTower(LlavaTower):
    """SigLIP on tiles; patches of a square share a token."""

    def probe_grids(self) -> list[Grid]:
        return tile_grids(self._vision.embeddings)
