"""ImagePreprocessor: reads a checkpoint's image settings, and converts an image to patches, not yet normalised."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.processing.checkpoint import image_processor_config, supports_images
from engine.processing.image_file import ImageFile, ImageRefused, check_sides
from engine.processing.patch_grid import PatchGrid
from engine.processing.patch_normalization import PatchNormalization
from engine.protocol import EngineFailed, ImagePatches, InvalidRequest

SETTINGS = (
    *("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels", "resample"),
    *("image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale"),
)


class ImagePreprocessor:
    """The settings of a checkpoint's image processor for resizing, cutting and normalising.

    Raises:
        EngineFailed: The processor is not of the Qwen2-VL family, or cannot be loaded.
    """

    def __init__(self, model_dir: Path):
        if not self.supported(model_dir):
            raise EngineFailed(f"{model_dir}: images require an image processor of the Qwen2-VL family")
        # Takes a second, so only processes that read images import it.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        config = image_processor_config(model_dir)
        try:
            processor: Any = Qwen2VLImageProcessorPil(**_settings(config))
            size = processor.size
            self.grid = PatchGrid(
                patch_size=int(processor.patch_size),
                merge_size=int(processor.merge_size),
                min_pixels=int(size["shortest_edge"]),
                max_pixels=int(size["longest_edge"]),
                resample=int(processor.resample),
            )
        except Exception as error:  # a checkpoint's files may be wrong in any way
            raise EngineFailed(f"{model_dir}: the image processor cannot be loaded ({error})") from None
        self.normalization = PatchNormalization.of(config)

    @staticmethod
    def supported(model_dir: Path) -> bool:
        return supports_images(model_dir)

    def read(self, content: bytes, max_pixels: int) -> ImagePatches:
        """Decode a trusted image in this process, resize it and cut it into patches. Raises InvalidRequest."""
        try:
            file = ImageFile(content, max_pixels)
            return self.patches(file.rgb(self.grid.target_size(*file.size)))
        except ImageRefused as error:
            raise InvalidRequest(str(error)) from None

    def patches(self, image: Image.Image) -> ImagePatches:
        """Resize an RGB image and cut it into patches. Raises InvalidRequest for an extremely narrow image."""
        try:
            check_sides(*image.size)
        except ImageRefused as error:
            raise InvalidRequest(str(error)) from None
        cut = self.grid.cut(image)
        num_tokens = cut.patches.nbytes // self.grid.token_bytes
        return ImagePatches(cut.patches, (1, *cut.grid_hw), num_tokens, cut.content_hash)


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
    scaled = (patches.astype(np.float32) * np.float32(normalization.rescale) - mean) / std
    repeated = np.repeat(scaled[:, :, None], normalization.temporal_patch_size, axis=2)
    return repeated.reshape(len(patches), -1)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the processor.

    Its class is fixed, since converted checkpoints name mlx-vlm's class, which transformers does not know.
    """
    size = config.get("size") or {}
    pixels = {key: size[key] for key in ("min_pixels", "max_pixels") if key in size}  # in old files
    edges = {key: size[key] for key in ("shortest_edge", "longest_edge") if key in size}
    known = {key: config[key] for key in SETTINGS if config.get(key) is not None}
    return {**pixels, **({"size": edges} if len(edges) == 2 else {}), **known}
