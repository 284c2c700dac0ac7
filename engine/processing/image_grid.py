"""ImageGrid: how a family of models resizes an image and cuts it into patches.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
from PIL import Image

LOW_DETAIL_PIXELS = 512 * 512
"""Largest width times height of an image in low detail."""


@dataclass(frozen=True)
class ImageLayout:
    """The division of an image of some size."""

    grid_thw: tuple[int, int, int]  # Tiles, and patches along height and width of each.
    tiles: tuple[int, int] = (0, 0)  # Tiles along height and width; (0, 0) for an image in one piece.
    unpadded: tuple[int, int] = (0, 0)
    """Patches of all tiles without padding, or without those in which they overlap, likewise; else (0, 0)."""
    thumbnail: tuple[int, int] = (0, 0)
    """Patches along height and width of a thumbnail behind the tiles, if it has a shape of its own; else (0, 0)."""

    inner: tuple[int, int] = (0, 0)
    """Pixels along height and width of the image within the padding of its tiles, if the tower asks; else (0, 0)."""

    @property
    def num_patches(self) -> int:
        tiles, height, width = self.grid_thw
        return tiles * height * width + self.thumbnail[0] * self.thumbnail[1]


@dataclass(frozen=True)
class CutImage:
    """One image in the form of the vision tower, not yet normalised."""

    patches: np.ndarray  # uint8 [num_patches, 3, patch_size, patch_size]
    layout: ImageLayout
    content_hash: str  # sha256 hex digest over mode, size, padding and pixels after resizing


def within(rows: int, columns: int, max_tokens: int) -> tuple[int, int]:
    """Return rows and columns of tokens with the longer side cut so that they are at most max_tokens, or one."""
    if rows * columns <= max_tokens:
        return rows, columns
    if rows > columns:
        return max(max_tokens // columns, 1), columns
    return rows, max(max_tokens // rows, 1)


@dataclass(frozen=True)
class ImageGrid(ABC):
    """The steps of an image processor before the normalisation of pixels."""

    patch_size: int  # pixels per side
    merge_size: int  # patches per side that share one token
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
    @abstractmethod
    def max_tokens(self) -> int:
        """Tokens of the largest image."""

    @abstractmethod
    def limited(self, max_tokens: int) -> Self:
        """Return the same grid with at most max_tokens tokens per image, or as few as it can have."""

    @abstractmethod
    def layout(self, width: int, height: int) -> ImageLayout:
        """Return the division of an image of this size."""

    @abstractmethod
    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized first."""

    @abstractmethod
    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        """Resize an RGB image, or a reduced copy of one of this size, and divide it into tiles of equal size."""

    def for_detail(self, is_low: bool) -> Self:
        """Return the grid for an image's `detail` (OpenAI's field): low limits it to LOW_DETAIL_PIXELS."""
        return self.limited(max(LOW_DETAIL_PIXELS // self.factor**2, 1)) if is_low else self

    def num_tokens(self, layout: ImageLayout) -> int:
        """Return the image tokens of an image."""
        return layout.num_patches // self.merge_size**2

    def cut(self, image: Image.Image, size: tuple[int, int] | None = None) -> CutImage:
        """Resize an RGB image and cut it into patches, in the order of the model's processor.

        Args:
            image: The image.
            size: Width and height of the image before a reduced decoding; default: its own.
        """
        width, height = size or image.size
        frames = [np.asarray(frame) for frame in self._frames(image, width, height)]
        layout, digest = self.layout(width, height), hashlib.sha256()
        digest.update(self._salt(layout).encode())
        for pixels in frames:
            digest.update(f"RGB {pixels.shape[1]}x{pixels.shape[0]} ".encode())
            digest.update(np.ascontiguousarray(pixels).data)
        patches = np.concatenate([self._patches(pixels, *layout.grid_thw[1:]) for pixels in frames])
        return CutImage(patches, layout, digest.hexdigest())

    def _salt(self, layout: ImageLayout) -> str:
        """Return facts of a layout on which the features depend, and which the pixels do not tell; '' if none."""
        return f"unpadded {layout.unpadded} " if any(layout.unpadded) else ""

    def _patches(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Cut uint8 [height, width, 3] into [rows * columns, 3, patch, patch], row by row; the rest is dropped."""
        patch = self.patch_size
        whole = pixels[: rows * patch, : columns * patch]
        blocks = whole.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(blocks.reshape(-1, 3, patch, patch))
