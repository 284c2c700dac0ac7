"""ImagePreprocessor: reads a checkpoint's image settings, and converts an image to patches, not yet normalised."""

from pathlib import Path

import numpy as np
from PIL import Image

from engine.errors import EngineFailed, InvalidRequest
from engine.processing.checkpoint import (
    image_processor_config,
    images_unsupported_reason,
    media_kinds,
    read_config,
    video_processor_config,
)
from engine.processing.family_grids import GRIDS
from engine.processing.grid_settings import video_grid
from engine.processing.image_file import ImageFile, ImageRefused, check_sides
from engine.processing.image_grid import CutImage, ImageGrid
from engine.processing.patch_normalization import PatchNormalization
from engine.processing.video_grid import VideoGrid
from engine.processing.vision_families import vision_family
from engine.protocol import ImagePatches


class ImagePreprocessor:
    """The settings of a checkpoint's image processor for resizing, cutting and normalising.

    Raises:
        EngineFailed: Images of this model are not supported, or its image processor cannot be loaded.
    """

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir
        config = read_config(model_dir)
        if (reason := images_unsupported_reason(model_dir, config)) is not None:
            raise EngineFailed(f"{model_dir}: the model accepts no images: {reason}")
        family = vision_family(config)
        assert family is not None
        settings = family.settings(image_processor_config(model_dir))
        try:
            self.grid: ImageGrid = GRIDS[family.name](settings, config)
        except Exception as error:  # a checkpoint's files may be wrong in any way
            raise EngineFailed(f"{model_dir}: the image processor cannot be loaded ({error})") from None
        self.normalization = PatchNormalization.of(settings)

    @property
    def video_grid(self) -> VideoGrid | None:
        """The settings for videos, None if the model accepts none. Raises EngineFailed."""
        config = read_config(self._model_dir)
        if "video" not in media_kinds(self._model_dir, config):
            return None
        try:
            return video_grid(video_processor_config(self._model_dir))
        except Exception as error:  # a checkpoint's files may be wrong in any way
            raise EngineFailed(f"{self._model_dir}: the video processor cannot be loaded ({error})") from None

    @staticmethod
    def supported(model_dir: Path) -> bool:
        return images_unsupported_reason(model_dir, read_config(model_dir)) is None

    def read(self, content: bytes, max_pixels: int) -> ImagePatches:
        """Decode a trusted image in this process, resize it and cut it into patches. Raises InvalidRequest."""
        try:
            file = ImageFile(content, max_pixels)
            return image_patches(self.grid.cut(file.rgb(self.grid.target_size(*file.size)), file.size), self.grid)
        except ImageRefused as error:
            raise InvalidRequest(str(error)) from None

    def patches(self, image: Image.Image) -> ImagePatches:
        """Resize an RGB image and cut it into patches. Raises InvalidRequest for an extremely narrow image."""
        try:
            check_sides(*image.size)
        except ImageRefused as error:
            raise InvalidRequest(str(error)) from None
        return image_patches(self.grid.cut(image), self.grid)


def image_patches(cut: CutImage, grid: ImageGrid) -> ImagePatches:
    """Return a cut image as the engine takes it."""
    layout = cut.layout
    num_tokens = grid.num_tokens(layout)
    return ImagePatches(
        cut.patches,
        layout.grid_thw,
        num_tokens,
        cut.content_hash,
        tiles=layout.tiles,
        unpadded=layout.unpadded,
        thumbnail=layout.thumbnail,
        inner=layout.inner,
    )


def normalize(patches: np.ndarray, normalization: PatchNormalization) -> np.ndarray:
    """Normalise patches; the reference for the engine's implementation on the device.

    Args:
        patches: uint8 [n, channels, patch, patch].
        normalization: The checkpoint's settings.

    Returns:
        float32 [n, channels * temporal * patch * patch].
    """
    mean = np.asarray(normalization.mean, dtype=np.float32)[:, None, None]
    std = np.asarray(normalization.std, dtype=np.float32)[:, None, None]
    scaled = (normalization.rescaled(patches.astype(np.float32)) - mean) / std
    repeated = np.repeat(scaled[:, :, None], normalization.temporal_patch_size, axis=2)
    return repeated.reshape(len(patches), -1)
