"""Encodes images into the language model's space: normalization, vision tower, and a cache of features."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.processing.patch_normalization import PatchNormalization
from engine.protocol import ImagePatches


@dataclass(slots=True, eq=False)
class ImageEncoding:
    """An image being encoded."""

    image: ImagePatches
    num_done: int = 0
    """Blocks of the tower computed so far."""
    hidden: mx.array | None = None
    """[patches, hidden size of the tower] after those blocks; None before the first and after the last."""
    rotary: mx.array | None = None
    """[patches, half a head's size], the angles of the positions; set as long as `hidden` is."""
    features: mx.array | None = None
    """[num_tokens, hidden], once the image is encoded."""


class VisionEncoder:
    """Encodes images in pieces, and caches features by content, least recently used first out.

    Follows the forward of mlx_vlm's qwen3_vl.vision.VisionModel (0.7.10) block by block, without the deepstack
    features, which no supported model uses.

    Args:
        module: The mlx_vlm model.
        normalization: Normalization of the pixels.
        max_bytes: Limit of the cached features.
    """

    def __init__(self, module: Any, normalization: PatchNormalization, max_bytes: int):
        self._tower = module.vision_tower
        self._norm = normalization
        self._max_bytes = max_bytes
        self._cache: OrderedDict[str, mx.array] = OrderedDict()
        self.num_cached_bytes = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the tower; each piece of an image has at least one."""
        return len(self._tower.blocks)

    def begin(self, image: ImagePatches) -> ImageEncoding:
        """Return an encoding that has not begun, or a complete one if the features are cached."""
        features = self._cache.get(image.content_hash)
        if features is not None:
            self._cache.move_to_end(image.content_hash)
        return ImageEncoding(image, features=features)

    def advance(self, encoding: ImageEncoding, num_blocks: int) -> None:
        """Compute the next `num_blocks` blocks, evaluated; cache the features after the last one."""
        self._run(encoding, num_blocks)
        if encoding.features is not None:
            self._remember(encoding.image.content_hash, encoding.features)

    def encode(self, image: ImagePatches) -> mx.array:
        """Return the features [num_tokens, hidden] of an image, evaluated, cached or encoded in one piece."""
        encoding = self.begin(image)
        if encoding.features is None:
            self.advance(encoding, self.num_blocks)
        assert encoding.features is not None
        return encoding.features

    def probe(self, side: int) -> tuple[int, int]:
        """Encode a black square of side * side tokens; return the number of patches and the feature bytes per token."""
        encoding = ImageEncoding(self._black(side))
        self._run(encoding, self.num_blocks)
        assert encoding.features is not None
        return len(encoding.image.patches), encoding.features.nbytes // (side * side)

    def probe_piece(self, side: int) -> int:
        """Encode one block of a black square of side * side tokens; return the bytes kept between pieces, per token."""
        encoding = ImageEncoding(self._black(side))
        self._run(encoding, 1)
        kept = [array for array in (encoding.hidden, encoding.rotary) if array is not None]
        return sum(array.nbytes for array in kept) // (side * side)

    def _black(self, side: int) -> ImagePatches:
        length, channels = side * self._norm.merge_size, len(self._norm.mean)
        patch = self._tower.patch_embed.patch_size
        pixels = np.zeros((length * length, channels, patch, patch), np.uint8)
        return ImagePatches(pixels, (1, length, length), side * side, "")

    def clear(self) -> None:
        """Drop all cached features."""
        self._cache.clear()
        self.num_cached_bytes = 0

    def _run(self, encoding: ImageEncoding, num_blocks: int) -> None:
        frames, height, width = encoding.image.grid_thw
        start, end = encoding.num_done, min(encoding.num_done + max(num_blocks, 1), self.num_blocks)
        hidden, rotary = self._embed(encoding.image) if start == 0 else (encoding.hidden, encoding.rotary)
        encoding.hidden = None  # the first block frees it
        bounds = mx.arange(frames + 1, dtype=mx.int32) * (height * width)
        for block in self._tower.blocks[start:end]:
            hidden = block(hidden, cu_seqlens=bounds, rotary_pos_emb=rotary)
        encoding.num_done = end
        if end < self.num_blocks:
            mx.eval(hidden, rotary)
            encoding.hidden, encoding.rotary = hidden, rotary
        else:
            encoding.features, encoding.rotary = self._tower.merger(hidden), None
            del hidden
            mx.eval(encoding.features)

    def _embed(self, image: ImagePatches) -> tuple[mx.array, mx.array]:
        """Return patches [n, hidden size of the tower] with learned positions, and the angles of the rotary ones."""
        tower, grid = self._tower, mx.array([image.grid_thw], mx.int32)
        hidden = tower.patch_embed(self._pixels(image, tower.patch_embed.proj.weight.dtype))
        return hidden + tower.fast_pos_embed_interpolate(grid), tower.rot_pos_emb(grid)

    def _pixels(self, image: ImagePatches, dtype: mx.Dtype) -> mx.array:
        """Normalize uint8 [n, C, p, p] -> [n, C * T * p * p]: a still image fills all T temporal slices of a patch."""
        n, channels, height, width = image.patches.shape
        norm = self._norm
        mean, std = (mx.array(v, mx.float32).reshape(1, channels, 1, 1) for v in (norm.mean, norm.std))
        pixels = (mx.array(image.patches).astype(mx.float32) * norm.rescale - mean) / std
        shape = (n, channels, norm.temporal_patch_size, height, width)
        return mx.broadcast_to(pixels[:, :, None], shape).reshape(n, -1).astype(dtype)

    def _remember(self, key: str, features: mx.array) -> None:
        if features.nbytes > self._max_bytes:
            return
        self._cache[key] = features
        self.num_cached_bytes += features.nbytes
        while self.num_cached_bytes > self._max_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.num_cached_bytes -= oldest.nbytes
