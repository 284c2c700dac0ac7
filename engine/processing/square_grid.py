"""SquareGrid: images of one size, as towers of CLIP and SigLIP take them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

from dataclasses import dataclass

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout


@dataclass(frozen=True)
class SquareGrid(ImageGrid):
    """The steps of an image processor that makes every image a square."""

    side: int  # pixels
    crops: bool = False  # resizes the shorter side and cuts the middle out of the longer one, instead of squeezing it

    @property
    def max_tokens(self) -> int:
        return self.num_tokens(self.layout(1, 1))

    def limited(self, max_tokens: int) -> "SquareGrid":
        return self  # the tower takes one size

    def layout(self, width: int, height: int) -> ImageLayout:
        num_patches = self.side // self.patch_size
        return ImageLayout((1, num_patches, num_patches))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        if not self.crops:
            return self.side, self.side
        shorter, longer = sorted((width, height))
        long = int(self.side * longer / shorter)
        return (self.side, long) if width <= height else (long, self.side)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        size = self.target_size(width, height)
        resized = image.resize(size, resample=self.resample)
        if not self.crops:
            return [resized]
        left, top = (size[0] - self.side) // 2, (size[1] - self.side) // 2
        return [resized.crop((left, top, left + self.side, top + self.side))]
