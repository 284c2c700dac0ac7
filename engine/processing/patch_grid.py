"""PatchGrid: the size to which a model's images are resized, and their division into patches.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class CutImage:
    """One image in the form of the vision tower, not yet normalised."""

    patches: np.ndarray  # uint8 [grid_h * grid_w, 3, patch_size, patch_size]
    grid_hw: tuple[int, int]  # patches along height and width
    content_hash: str  # sha256 hex digest over mode, size and pixels after resizing


LOW_DETAIL_PIXELS = 512 * 512
"""Largest width times height of an image in low detail."""


@dataclass(frozen=True)
class PatchGrid:
    """The steps of a Qwen2-VL image processor before the normalisation of pixels."""

    patch_size: int  # pixels per side
    merge_size: int  # patches per side that share one token
    min_pixels: int  # smaller images are enlarged
    max_pixels: int  # larger images are reduced
    resample: int  # PIL.Image.Resampling

    @property
    def factor(self) -> int:
        """Pixels per side of the square of one token."""
        return self.patch_size * self.merge_size

    @property
    def token_bytes(self) -> int:
        """Bytes of the patches of one token."""
        return 3 * self.factor**2

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // self.factor**2

    def limited(self, max_tokens: int) -> "PatchGrid":
        """Return the same grid with at most max_tokens tokens per image."""
        max_pixels = min(self.max_pixels, max_tokens * self.factor**2)
        return replace(self, max_pixels=max_pixels, min_pixels=min(self.min_pixels, max_pixels))

    def for_detail(self, is_low: bool) -> "PatchGrid":
        """Return the grid for an image's `detail` (OpenAI's field): low limits it to LOW_DETAIL_PIXELS."""
        return self.limited(max(LOW_DETAIL_PIXELS // self.factor**2, 1)) if is_low else self

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized: multiples of `factor`.

        Source: `smart_resize` of transformers' Qwen2-VL image processor.
        """
        new_height, new_width = (round(side / self.factor) * self.factor for side in (height, width))
        if new_height * new_width > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (
                max(self.factor, math.floor(side / scale / self.factor) * self.factor) for side in (height, width)
            )
        elif new_height * new_width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(side * scale / self.factor) * self.factor for side in (height, width))
        return new_width, new_height

    def cut(self, image: Image.Image, size: tuple[int, int] | None = None) -> CutImage:
        """Resize an RGB image and cut it into patches, in the order of transformers' processor.

        Args:
            image: The image.
            size: Width and height to resize to; default: `target_size` of the image.
        """
        width, height = size or self.target_size(*image.size)
        pixels = np.asarray(image.resize((width, height), resample=self.resample))
        digest = hashlib.sha256(f"RGB {width}x{height} ".encode())
        digest.update(np.ascontiguousarray(pixels).data)
        patch, merge = self.patch_size, self.merge_size
        grid_hw = height // patch, width // patch
        blocks = pixels.reshape(grid_hw[0] // merge, merge, patch, grid_hw[1] // merge, merge, patch, 3)
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
        return CutImage(np.ascontiguousarray(patches), grid_hw, digest.hexdigest())
