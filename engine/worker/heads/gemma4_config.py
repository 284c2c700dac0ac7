"""Reads config.json of Gemma 4's assistants, and refuses by name what would be other arithmetic than the library's."""

from pathlib import Path
from typing import Any

from mlx_vlm.speculative.drafters.gemma4_assistant.config import Gemma4AssistantConfig

from engine.errors import EngineFailed
from engine.processing.reference_config import arithmetic_reference
from engine.worker.config_fields import check_arithmetic

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
REQUIRED = ("backbone_hidden_size", "text_config")
REQUIRED_OF_LAYERS = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "head_dim", "num_attention_heads", "rms_norm_eps"),
    *("layer_types", "rope_parameters", "sliding_window", "hidden_size_per_layer_input"),
)
"""Fields of text_config for which the library has defaults, those of a target."""
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "enable_moe_block": (None, False),
    "hidden_size_per_layer_input": (0,),
    "use_double_wide_mlp": (None, False),
}
"""Values of fields of text_config for which the layers compute with the keys and values of the target alone."""
FULL, SLIDING = "full_attention", "sliding_attention"


def is_assistant(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of an assistant of Gemma 4."""
    return config.get("model_type") in MODEL_TYPES


def assistant_config(config: dict[str, Any], head_dir: Path) -> Gemma4AssistantConfig:
    """Return the library's configuration of an assistant.

    Args:
        config: Its config.json.
        head_dir: Where it is, for messages.

    Raises:
        EngineFailed: A field is missing, or asks for something that is not computed; names it and its value.
    """
    try:
        if (reason := _of_fields(config)) is not None:
            raise EngineFailed(reason)
        found = Gemma4AssistantConfig.from_dict(config)
        if (reason := _of_layers(found) or _of_centroids(found)) is not None:
            raise EngineFailed(reason)
        section = config["text_config"]
        check_arithmetic("gemma4_text", section, found.text_config, arithmetic_reference(section))
    except EngineFailed as error:
        raise EngineFailed(f"the Gemma 4 assistant in {head_dir} is not supported: {error}") from None
    return found


def _of_fields(config: dict[str, Any]) -> str | None:
    section = config.get("text_config") or {}
    missing = [
        *(name for name in REQUIRED if not config.get(name)),
        *(f"text_config.{name}" for name in REQUIRED_OF_LAYERS if section.get(name) is None),
    ]
    if missing:
        return f"config.json has no {missing[0]}"
    for name, values in ONLY.items():
        if section.get(name) not in values:
            return f"text_config.{name} is {section[name]!r}, expected {values[-1]!r}"
    if config.get("tie_word_embeddings", True) is not True:
        return f"tie_word_embeddings is {config['tie_word_embeddings']!r}, expected True"
    return None


def _of_layers(config: Gemma4AssistantConfig) -> str | None:
    text: Any = config.text_config
    num_layers, kinds = text.num_hidden_layers, text.layer_types
    if text.num_kv_shared_layers != num_layers:
        return f"text_config.num_kv_shared_layers is {text.num_kv_shared_layers!r}, expected all {num_layers} layers"
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        return f"text_config.layer_types is {kinds!r}, expected {FULL} or {SLIDING} for each of {num_layers} layers"
    return None


def _of_centroids(config: Gemma4AssistantConfig) -> str | None:
    if not config.use_ordered_embeddings:
        return None
    text: Any = config.text_config
    vocab, centroids, chosen = text.vocab_size, config.num_centroids, config.centroid_intermediate_top_k
    if type(centroids) is not int or centroids < 1 or vocab % centroids:
        return f"num_centroids is {centroids!r}, expected a divisor of vocab_size, {vocab}"
    if type(chosen) is not int or not 1 <= chosen <= centroids:
        return f"centroid_intermediate_top_k is {chosen!r}, expected 1 to {centroids}, the number of centroids"
    return None
