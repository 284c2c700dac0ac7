"""ImagePreprocessor: a picture to the patches of the model's vision tower, without torch and not yet normalised."""

from pathlib import Path
from typing import Any

import numpy as np

from engine.processing.checkpoint import image_processor_config, supports_images
from engine.processing.media import DecodedImage, check_sides
from engine.processing.patch_normalization import PatchNormalization
from engine.protocol import EngineFailed, ImagePatches

SETTINGS = (
    *("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels", "resample"),
    *("image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale"),
)


class ImagePreprocessor:
    """transformers' own resizing and cutting for one checkpoint. Raises EngineFailed for a processor that we lack."""

    def __init__(self, model_dir: Path):
        if not self.supported(model_dir):
            raise EngineFailed(f"{model_dir}: images need a processor of the Qwen2-VL family")
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,  # takes a second
        )

        config = image_processor_config(model_dir)
        try:
            processor: Any = Qwen2VLImageProcessorPil(**_settings(config))
        except Exception as error:  # files of the checkpoint: anything can be wrong with them
            raise EngineFailed(f"{model_dir}: the image processor cannot be loaded ({error})") from None
        self._processor = processor
        self._patch = int(processor.patch_size)
        self.normalization = PatchNormalization.of(config)

    @staticmethod
    def supported(model_dir: Path) -> bool:
        return supports_images(model_dir)

    def patches(self, decoded: DecodedImage) -> ImagePatches:
        """Resized to the model's limits and cut. Raises InvalidRequest for a shape that cannot be cut."""
        check_sides(*decoded.image.size)
        output = self._processor(
            images=[decoded.image], do_rescale=False, do_normalize=False, do_convert_rgb=False, return_tensors="np"
        )
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        flat = output["pixel_values"].reshape(t * h * w, 3, -1, self._patch, self._patch)
        return ImagePatches(
            patches=np.ascontiguousarray(flat[:, :, 0]).astype(np.uint8),  # a still picture: every slice is the same
            grid_thw=(t, h, w),
            num_tokens=t * h * w // self.normalization.merge_size**2,
            content_hash=decoded.content_hash,
        )


def normalize(patches: np.ndarray, normalization: PatchNormalization) -> np.ndarray:
    """uint8 [n, channels, patch, patch] to float32 [n, channels * temporal * patch * patch]: the reference for what
    the engine does on its device."""
    mean = np.asarray(normalization.mean, dtype=np.float32)[:, None, None]
    std = np.asarray(normalization.std, dtype=np.float32)[:, None, None]
    scaled = (patches.astype(np.float32) * np.float32(normalization.rescale) - mean) / std
    repeated = np.repeat(scaled[:, :, None], normalization.temporal_patch_size, axis=2)
    return repeated.reshape(len(patches), -1)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """What the processor takes. Its class is named here, not by the checkpoint: converted ones name mlx-vlm's, which
    the automatic choice of transformers does not know."""
    size = config.get("size") or {}
    pixels = {key: size[key] for key in ("min_pixels", "max_pixels") if key in size}  # where old files have them
    edges = {key: size[key] for key in ("shortest_edge", "longest_edge") if key in size}
    known = {key: config[key] for key in SETTINGS if config.get(key) is not None}
    return {**pixels, **({"size": edges} if len(edges) == 2 else {}), **known}
