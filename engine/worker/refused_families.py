"""Families that are refused by name: their caches are of served kinds, but their tokens would be wrong.

Other families are refused by the caches of their layers (`family.py`).
"""

from typing import Any

from engine.processing.reference_config import text_section

BOTH_WAYS = "tokens of a prompt see those after them, and prompts are computed in chunks that see only what is before"
BLOCKS = f"it writes blocks of tokens that see each other (diffusion): {BOTH_WAYS}"
CROSS = "its cross-attention reads an image or a document in every request, which is not passed to it"
DECISIONS = "it reads decisions off a prompt and generates no text"

REFUSED: dict[str, str] = {
    "clef": DECISIONS,
    "d1": DECISIONS,
    "diffusion_gemma": BLOCKS,
    "falcon_ocr": "its positions are those of pixels, which the library keeps for one prompt at a time",
    "falcon_perception": "the library masks no later tokens of a prompt without an image",
    "florence2": CROSS,
    "llada2_moe": BLOCKS,
    "llava_bunny": "its config.json needs the key auto_map, which names code in the checkpoint",
    "mllama": CROSS,
    "molmo_point": "its answers contain points, which the library computes from image features between two tokens",
    "nemotron_parse": CROSS,
}
"""model_type -> why its text cannot be served."""

NEMOTRON_NAS = ("nemotron_nas", "nemotron-nas")


def refusal(config: dict[str, Any]) -> str | None:
    """Return why a checkpoint is refused by the name of its family; None if it is not.

    Args:
        config: The checkpoint's config.json.
    """
    model_type, blocks = str(config.get("model_type")), config.get("block_configs")
    if model_type == "glm5_next" and text_section(config).get("index_kpool_always_select_tail") is False:
        return "with index_kpool_always_select_tail false its first tokens see no token, not even themselves"
    if model_type == "molmo2":
        for name in ("norm_after", "rope_scaling_layers"):
            if value := text_section(config).get(name):
                return f"config.json has {name} {value!r}, which the library's module does not read"
    if model_type == "molmo":
        for name in ("attention_layer_norm", "norm_after"):
            if value := text_section(config).get(name, config.get(name)):
                return f"config.json has {name} {value!r}, which the library's module does not read"
    window = config.get("sliding_window")
    if model_type == "phi3_v" and isinstance(window, int) and window < config.get("max_position_embeddings", 0):
        return f"config.json has sliding_window {window}, which the library's module does not read"
    if model_type in NEMOTRON_NAS and isinstance(blocks, list):
        attentions = [block.get("attention") if isinstance(block, dict) else None for block in blocks]
        for i, attention in enumerate(attentions):
            if isinstance(attention, dict) and attention.get("replace_with_linear"):
                return (
                    f"layer {i} has a linear layer in place of attention (replace_with_linear), and the library gives "
                    "it a cache that nothing fills"
                )
    return REFUSED.get(model_type)
