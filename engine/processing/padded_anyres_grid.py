"""PaddedAnyresGrid: a square of the whole image and tiles of it, both in padding, as DeepSeek-VL2 takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import tiles_of


@dataclass(frozen=True)
class PaddedAnyresGrid(ImageGrid):
    """The steps of the published processor of DeepSeek-VL2 before the normalisation of pixels.

    Patches of a square share a token; a row of patches that is left over shares tokens with padding. A token ends each
    row of the square and of all tiles together, and one stands between the two.
    """

    side: int  # pixels of the square and of a tile
    resolutions: tuple[tuple[int, int], ...]  # widths and heights of padded images, in pixels; multiples of `side`
    padding: tuple[int, int, int]  # red, green and blue around the image

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolutions", tuple((width, height) for width, height in self.resolutions))
        object.__setattr__(self, "padding", tuple(self.padding))

    @property
    def tile_side(self) -> int:
        """Tokens along each side of a tile."""
        return -(-self._num_patches // self.merge_size)

    @property
    def max_tokens(self) -> int:
        return max(map(self._tokens, self.resolutions))

    @property
    def token_bytes(self) -> int:
        """Most bytes of patches per token."""
        most = max(1 + width * height // self.side**2 for width, height in self.resolutions)
        return -(-3 * most * (self._num_patches * self.patch_size) ** 2 // self.max_tokens)

    def limited(self, max_tokens: int) -> "PaddedAnyresGrid":
        most = max(max_tokens, min(map(self._tokens, self.resolutions)))
        return replace(self, resolutions=tuple(one for one in self.resolutions if self._tokens(one) <= most))

    def layout(self, width: int, height: int) -> ImageLayout:
        columns, rows = (length // self.side for length in self._resolution(width, height))
        return ImageLayout((1 + rows * columns, self._num_patches, self._num_patches), (rows, columns))

    def num_tokens(self, layout: ImageLayout) -> int:
        rows, columns = layout.tiles
        return self._tokens((columns * self.side, rows * self.side))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the padding of the square or of the tiles, whichever is larger."""
        square, whole = (_inner(width, height, size) for size in (self._square, self._resolution(width, height)))
        return max(square[0], whole[0]), max(square[1], whole[1])

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        square, whole = (
            self._padded(image, _inner(width, height, size), size)
            for size in (self._square, self._resolution(width, height))
        )
        return [square, *tiles_of(whole, self.side)]

    @property
    def _square(self) -> tuple[int, int]:
        return self.side, self.side

    @property
    def _num_patches(self) -> int:
        """Whole patches along each side of a tile."""
        return self.side // self.patch_size

    def _tokens(self, resolution: tuple[int, int]) -> int:
        """Return the tokens of an image that is padded to this width and height."""
        side, (columns, rows) = self.tile_side, (length // self.side for length in resolution)
        return side * (side + 1) + 1 + rows * side * (columns * side + 1)

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that keep most of the image's pixels, and then waste the fewest.

        Source: `select_best_resolution` of DeepSeek-VL2.
        """
        best, most, least_waste = self.resolutions[0], 0, math.inf
        for one in self.resolutions:
            scale = min(one[0] / width, one[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            waste = one[0] * one[1] - kept
            if kept > most or (kept == most and waste < least_waste):
                best, most, least_waste = one, kept, waste
        return best

    def _padded(self, image: Image.Image, inner: tuple[int, int], size: tuple[int, int]) -> Image.Image:
        """Return an image resized to `inner`, in the middle of the padding. Source: `ImageOps.pad` of Pillow."""
        padded = Image.new("RGB", size, self.padding)
        left, top = (round((whole - length) * 0.5) for whole, length in zip(size, inner, strict=True))
        padded.paste(image.resize(inner, resample=self.resample), (left, top))
        return padded

    def _salt(self, layout: ImageLayout) -> str:
        return f"tiles {layout.tiles} "


def _inner(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height of an image in the padding. Source: `ImageOps.contain` of Pillow."""
    if width / height > size[0] / size[1]:
        return size[0], round(height / width * size[0])
    return round(width / height * size[1]), size[1]
