"""PaliGemma 1 and 2 in the vision zoo: one square before the text; the tokens of a prompt see each other."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.support.families.family import GEMMA, WINDOW, text
from tests.support.sighted_family import IDS, IMAGE_SIZE, NORMALIZED, PATCH, SQUARE, TOWER, SightedFamily, prepared
from tests.support.square_families import one_square
from tests.support.view_families import embedder_of

NUM_TOKENS = (IMAGE_SIZE // PATCH) ** 2
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "PaliGemmaProcessor",
    "image_seq_length": NUM_TOKENS,
    "size": SQUARE,
    "resample": 3,
    **NORMALIZED,
}
_known = {key: value for key, value in PROCESSOR.items() if key not in ("processor_class", "image_seq_length")}


def paligemma(text_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config.json, with the fields of the published ones."""
    return {
        "model_type": "paligemma",
        "text_config": {**text_config, "num_image_tokens": NUM_TOKENS},
        "vision_config": {
            **TOWER,
            "model_type": "siglip_vision_model",
            "num_image_tokens": NUM_TOKENS,
            "projection_dim": 64,
            "projector_hidden_act": "gelu_fast",
            "vision_use_head": False,
        },
        "image_token_index": IDS["<image>"],
        "pad_token_id": IDS["<pad>"],
        "eos_token_id": IDS["<|im_end|>"],
        "hidden_size": 64,
        "projection_dim": 64,
        **more,
    }


def embedder(module: Any, arrays: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    """Embed the images one by one: the library takes one per prompt."""
    features = []
    for pixels in arrays["pixel_values"]:
        states, _, _ = module.vision_tower(pixels[None].transpose(0, 2, 3, 1), output_hidden_states=True)
        features.append(module.multi_modal_projector(states[None])[0] / module.language_model.config.hidden_size**0.5)
    return embedder_of(module, features)


def logits(language_model: Any, embeds: mx.array, num_prompt: int) -> mx.array:
    """Compute a whole sequence with the masks of transformers: `block_sequence_ids` of PaliGemma's forward."""
    config, place = language_model.config, np.arange(embeds.shape[1])
    is_prompt = place < num_prompt
    before, block = place <= place[:, None], is_prompt & is_prompt[:, None]
    near = place > place[:, None] - config.sliding_window
    masks = {"full_attention": before | block, "sliding_attention": (before & near) | block}
    hidden = embeds * config.hidden_size**0.5
    kinds = config.layer_types or ["full_attention"] * config.num_hidden_layers
    for kind, layer in zip(kinds, language_model.layers, strict=True):
        hidden = layer(hidden, mx.array(masks[kind])[None, None], None)
    found = language_model.model.embed_tokens.as_linear(language_model.model.norm(hidden))
    cap = config.final_logit_softcapping
    return found if cap is None else mx.tanh(found / cap) * cap


def _family(config: dict[str, Any], seed: int) -> SightedFamily:
    pixels: Callable[[Sequence[Image.Image]], dict[str, np.ndarray]] = prepared(
        SiglipImageProcessorPil, _known, "pixel_values"
    )
    return SightedFamily(
        config,
        PROCESSOR,
        pixels,
        one_square(NUM_TOKENS),
        seed=seed,
        embedder=embedder,
        images_first="",
        logits=logits,
    )


ONE = _family(paligemma(text("gemma", num_key_value_heads=1)), seed=0)
"""PaliGemma 1."""
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
TWO = _family(paligemma(text("gemma2", GEMMA, CAPPED, sliding_window=WINDOW)), seed=5)
"""PaliGemma 2, whose layers have windows that are shorter than an image."""
