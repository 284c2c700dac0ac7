"""Pictures into the language model's space: normalise on the device, run the tower, keep what comes back often."""

from collections import OrderedDict
from typing import Any

import mlx.core as mx
import numpy as np

from engine.processing.patch_normalization import PatchNormalization
from engine.protocol import ImagePatches


class VisionEncoder:
    """Features per picture, cached by content within `max_bytes`, least recently used first out."""

    def __init__(self, module: Any, normalization: PatchNormalization, max_bytes: int):
        self._tower = module.vision_tower
        self._norm = normalization
        self._max_bytes = max_bytes
        self._cache: OrderedDict[str, mx.array] = OrderedDict()
        self.num_cached_bytes = 0

    def encode(self, image: ImagePatches) -> mx.array:
        """[num_tokens, hidden], evaluated. One picture at a time, so that no step waits for more than one."""
        features = self._cache.get(image.content_hash)
        if features is None:
            features = self._run(image)
            mx.eval(features)
            self._remember(image.content_hash, features)
        else:
            self._cache.move_to_end(image.content_hash)
        return features

    def probe(self, side: int) -> tuple[int, int]:
        """Runs the tower on a black square of side * side tokens: how many patches that are, and bytes per token."""
        length, channels = side * self._norm.merge_size, len(self._norm.mean)
        patch = self._tower.patch_embed.patch_size
        pixels = np.zeros((length * length, channels, patch, patch), np.uint8)
        features = self._run(ImagePatches(pixels, (1, length, length), side * side, ""))
        mx.eval(features)
        return length * length, features.nbytes // (side * side)

    def clear(self) -> None:
        """Forgets all features."""
        self._cache.clear()
        self.num_cached_bytes = 0

    def _run(self, image: ImagePatches) -> mx.array:
        dtype = self._tower.patch_embed.proj.weight.dtype
        return self._tower(self._pixels(image, dtype), mx.array([image.grid_thw], mx.int32))[0]

    def _pixels(self, image: ImagePatches, dtype: mx.Dtype) -> mx.array:
        """uint8 [n, C, p, p] -> normalised [n, C * T * p * p]: a still picture fills all T slices of a patch."""
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
