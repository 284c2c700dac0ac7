"""NaFlexGrid: images near their own size, in whole patches, each of which is a token, as Phi-4-reasoning-vision's.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout

LEAST_SCALE, MOST_SCALE, PRECISION = 1e-6, 100.0, 1e-5
"""Between which factors of an image's size transformers searches, and where it stops."""


@dataclass(frozen=True)
class NaFlexGrid(ImageGrid):
    """The steps of the image processor of Phi-4-reasoning-vision before the normalisation of pixels."""

    min_patches: int  # smaller images are enlarged
    max_patches: int  # larger images are reduced

    @property
    def max_tokens(self) -> int:
        return self.max_patches

    def limited(self, max_tokens: int) -> "NaFlexGrid":
        max_patches = min(self.max_patches, max_tokens)
        return replace(self, max_patches=max_patches, min_patches=min(self.min_patches, max_patches))

    def layout(self, width: int, height: int) -> ImageLayout:
        columns, rows = (side // self.patch_size for side in self.target_size(width, height))
        return ImageLayout((1, rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized.

        Source: the processor `Siglip2ImageProcessorNoUpscale` of the published checkpoint, which keeps about as many
        patches as the image has, and `get_image_size_for_max_num_patches` of transformers, which rounds them up.
        """
        own = max((width // self.patch_size) * (height // self.patch_size), 1)
        most = min(max(own, self.min_patches), self.max_patches)

        def patches_of(side: int, scale: float) -> int:
            return max(math.ceil(side * scale / self.patch_size), 1)

        least, above = LEAST_SCALE, MOST_SCALE
        while above - least >= PRECISION:
            scale = (least + above) / 2
            if patches_of(width, scale) * patches_of(height, scale) <= most:
                least = scale
            else:
                above = scale
        return patches_of(width, least) * self.patch_size, patches_of(height, least) * self.patch_size

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        return [image.resize(self.target_size(width, height), resample=self.resample)]
