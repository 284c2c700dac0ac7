"""Refuses a checkpoint whose layers attend to other tokens in the library's module than its config.json says."""

from typing import Any

from mlx_vlm.models.cache import make_prompt_cache

from engine.errors import EngineFailed
from engine.processing.reference_config import RECURRENT, Reach, declared_reaches, text_section
from engine.worker.layer_caches import reach_of

PATTERN = (
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "attention_chunk_size"),
    *("sliding_window_size", "full_attention_interval", "layer_types", "compress_ratios", "compress_rates"),
)
"""Fields that say which layers have which window."""


def check_windows(language_model: Any, config: dict[str, Any], max_context_tokens: int) -> None:
    """Compare the caches of the library's module with the windows of config.json, as transformers resolves them.

    Args:
        language_model: The library's module; its weights need not be read.
        config: The checkpoint's config.json.
        max_context_tokens: A window of so many tokens and more is none.

    Raises:
        EngineFailed: A layer has another window, or is of another kind; names the fields with both values.
    """
    declared, found = declared_reaches(config), found_reaches(language_model)
    if declared is None:
        return
    wanted, built = (
        [None if isinstance(one, int) and one >= max_context_tokens else one for one in reaches]
        for reaches in (declared, found)
    )
    pairs = list(zip(wanted, built, strict=False))
    if len(wanted) != len(built):  # layers that share a cache, or have none
        pairs = [] if set(wanted) == set(built) else [(wanted[0], built[0])]
    if (layer := next((i for i, (one, other) in enumerate(pairs) if one != other), None)) is None:
        return
    section = text_section(config)
    family = section.get("model_type", config.get("model_type"))
    fields = ", ".join(f"{name} {section[name]!r}" for name in PATTERN if section.get(name) is not None)
    raise EngineFailed(
        f"by config.json ({fields or 'with the defaults of transformers'}) layer {layer} {_described(wanted[layer])}, "
        f"but in the library's module of the family {family} it {_described(built[layer])}; the answers would be wrong"
    )


def found_reaches(language_model: Any) -> list[Reach]:
    """Return the reach of each layer of the library's module, by its caches."""
    return [reach_of(layer) for layer in make_prompt_cache(language_model)]


def _described(reach: Reach) -> str:
    if reach == RECURRENT:
        return "is recurrent"
    if isinstance(reach, str):
        return f"attends to {reach}"
    return "attends to all tokens" if reach is None else f"attends to {reach} tokens"
