"""Phi-4-reasoning-vision in the vision zoo: images near their own size, each patch of which is a token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.phi4_siglip.phi4_siglip import IMAGE_TOKEN_INDEX
from PIL import Image
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from tests.support.families.vision import VISION_FAMILIES
from tests.support.sighted_family import IDS, NORMALIZED, PATCH, Pixels, SightedFamily
from tests.support.view_families import embedder_of

ARRAYS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
LIMITS = {"min_num_patches": 6, "max_num_patches": 20}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Siglip2ImageProcessor",
    "patch_size": PATCH,
    "resample": 2,
    **LIMITS,
    **NORMALIZED,
}


def own_patches(width: int, height: int, patch_size: int = PATCH, limits: dict[str, int] = LIMITS) -> int:
    """Return how many patches an image keeps at most, as the processor of the published checkpoint has it."""
    own = max((width // patch_size) * (height // patch_size), 1)
    return min(max(own, limits["min_num_patches"]), limits["max_num_patches"])


def library_pixels(images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with transformers' processor, which knows only a most number of patches, and pad them alike."""
    arrays: dict[str, list[np.ndarray]] = {key: [] for key in ARRAYS}
    for image in images:
        processor = Siglip2ImageProcessorPil(
            patch_size=PATCH, max_num_patches=own_patches(*image.size), resample=2, **NORMALIZED
        )
        made = processor(images=[image], return_tensors="np")
        for key, found in arrays.items():
            array = np.array(made[key])[0]
            missing = LIMITS["max_num_patches"] - len(array) if key != "spatial_shapes" else 0
            found.append(np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)))
    return {key: np.stack(found) for key, found in arrays.items()}


def embedder(module: Any, arrays: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    """Let the library see each image without padding: its tower has no mask, and would attend to that."""
    features = []
    for pixels, mask, shape in zip(*(arrays[key] for key in ARRAYS), strict=True):
        num_patches = int(mask.sum().item())
        image = {"pixel_values": pixels[None, :num_patches], "spatial_shapes": shape[None]}
        placed = module.get_input_embeddings(mx.array([[IMAGE_TOKEN_INDEX]]), **image)
        features.append(placed.inputs_embeds[0])
    return embedder_of(module, features)


_text = VISION_FAMILIES["phi4_siglip"].config
PHI4 = SightedFamily(
    {
        **_text,  # published ones have the language model's sizes at the top, which the library reads as its defaults
        "model_type": "phi4-siglip",
        "vision_config": {**_text["vision_config"], "num_hidden_layers": 4},
        "mm_vision_tower": "google/siglip2-tiny-patch8-naflex",
        "eos_token_id": IDS["<|im_end|>"],
        **LIMITS,
    },
    PROCESSOR,
    library_pixels,
    lambda image: "<|dummy_0|>" * image.num_tokens + "\n",
    None,
    seed=15,
    names={"<image>": "<|dummy_0|>"},
    embedder=embedder,
)
PUBLISHED = replace(PHI4, processor={})
"""Without the configuration of an image processor, as its authors' code needs none."""
