"""Molmo in the vision zoo: a square of the whole image and overlapping crops of it, in padding, before the text."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.molmo.processing_molmo import MolmoImageProcessor
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.vision import VISION_FAMILIES
from tests.support.sighted_family import IDS, NORMALIZED, PATCH, Pixels, SightedFamily

SIDE = 8 * PATCH  # pixels of a crop
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "MolmoImageProcessor",
    "base_image_input_size": [SIDE, SIDE],
    "image_patch_size": PATCH,
    "image_token_length_h": 4,
    "image_token_length_w": 4,
    "max_crops": 4,
    "overlap_margins": [2, 2],
    "image_padding_mask": True,
    "do_normalize": True,
    **NORMALIZED,
}
VISION: dict[str, Any] = {
    "model_type": "molmo",
    "image_default_input_size": [SIDE, SIDE],
    "image_patch_size": PATCH,
    "image_num_pos": 1 + 8 * 8,
    "image_emb_dim": 32,
    "image_num_heads": 2,
    "image_num_key_value_heads": 2,
    "image_head_dim": 16,
    "image_num_layers": 4,
    "image_mlp_dim": 64,
    "hidden_size": 64,
    "d_model": 64,
    "vit_layers": [-2, -3],
}
NAMES = {
    "<image>": "<im_patch>",
    "<start>": "<im_start>",
    "<end>": "<im_end>",
    "<break>": "<im_col>",
    "<fake_token_around_image>": "<|image|>",
}
TOKENS = ("<image>", "<break>", "<start>", "<end>")


def library_image(settings: dict[str, Any], image: Image.Image) -> tuple[np.ndarray, ...]:
    """Return the crops, the tokens, the token of each feature and the shares of patches without padding of an image.

    settings: preprocessor_config.json.
    """
    known = {key: value for key, value in settings.items() if key != "image_processor_type"}
    pixels = np.array(image).astype(np.float32) / 255
    with np.errstate(divide="ignore"):  # an image that is as long as the margins of a crop
        return MolmoImageProcessor(**known).preprocess(pixels, *(IDS[token] for token in TOKENS))


def library_pixels(images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with the library's processor, one by one.

    Returns:
        pixel_values: [num_views, patches, 3 * patch * patch], of all images.
        index: The token of each feature within those of its image, negative for none, [num_views, features].
        masks: [num_views, patches].
        counts: Views of each image.
        lengths: Tokens of each image.
    """
    crops, tokens, index, masks = zip(*(library_image(PROCESSOR, image) for image in images), strict=True)
    return {
        "pixel_values": np.concatenate(crops).astype(np.float32),
        "index": np.concatenate(index),
        "masks": np.concatenate(masks),
        "counts": np.array([len(one) for one in crops]),
        "lengths": np.array([len(one) for one in tokens]),
    }


def library_features(module: Any, arrays: dict[str, Any]) -> list[tuple[np.ndarray, mx.array]]:
    """Return, for each image, the places of its features among its tokens, ascending, and the features."""
    found, start = [], 0
    for count in np.array(arrays["counts"]).tolist():
        views = slice(start, start := start + count)
        features, _ = module.vision_tower(arrays["pixel_values"][views][None], arrays["masks"][views][None])
        places = np.array(arrays["index"][views]).reshape(-1)
        order = np.argsort(places)[(places < 0).sum() :]
        found.append((places[order], features.reshape(len(places), -1)[mx.array(order)]))
    return found


def embedder(module: Any, arrays: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    """Let the library see all images of a prompt, whose tokens stand behind each other."""
    found = library_features(module, arrays)

    def embed(ids: mx.array) -> InputEmbeddingsFeatures:
        embeds = module.get_input_embeddings(ids).inputs_embeds
        start = np.array(ids)[0].tolist().index(IDS["<start>"])
        for (places, features), length in zip(found, np.array(arrays["lengths"]).tolist(), strict=True):
            embeds[0, mx.array(start + places)] += features
            start += length
        return InputEmbeddingsFeatures(inputs_embeds=embeds)

    return embed


def placed(image: ImagePatches) -> str:
    """Return the tokens that the library gives an image with as many crops."""
    height, width = (length * PATCH for length in image.unpadded)
    spelled = {IDS[token]: NAMES[token] for token in TOKENS}
    _, tokens, _, _ = library_image(PROCESSOR, Image.new("RGB", (width, height)))
    return "".join(spelled[token] for token in tokens.tolist())


MOLMO = SightedFamily(
    {
        "model_type": "molmo",
        "text_config": {**VISION_FAMILIES["molmo"].config["text_config"], "additional_vocab_size": 8},
        "vision_config": VISION,
        "eos_token_id": IDS["<|im_end|>"],
    },
    PROCESSOR,
    library_pixels,
    placed,
    "<|image|>",
    seed=3,
    names=NAMES,
    embedder=embedder,
    images_first=" ",
)
