"""Proves on a model's modules that a rope scaling is applied, and fixes the factors of scalings that change midway."""

from collections.abc import Iterator
from typing import Any

from mlx_vlm.models.deepseek_v4.language import DeepseekV4RoPE
from mlx_vlm.models.rope_utils import SuScaledRoPE

from engine.errors import EngineFailed

CLASS_NAMES = {
    "yarn": "Yarn",
    "deepseek_yarn": "Yarn",
    "telechat3-yarn": "Yarn",
    "llama3": "Llama3",
    "longrope": "SuScaled",
    "su": "SuScaled",
    "dynamic": "Dynamic",
}
"""Part of the class name of the libraries' ropes by the type of the scaling; linear scaling is an attribute instead."""


def check_scaling(language_model: Any, scaling: dict[str, Any]) -> None:
    """Check that the language model has a rope with this scaling: many families ignore what config.json says of it.

    Args:
        language_model: The library's module; its weights need not be read.
        scaling: An entry of `declared_scalings`.

    Raises:
        EngineFailed: No rope has it.
    """
    kind, ropes = scaling["rope_type"], list(_ropes(language_model))
    if any(isinstance(rope, DeepseekV4RoPE) for rope in ropes):
        is_applied = any(map(_is_scaled, ropes))
    elif kind == "linear":
        is_applied = any(abs(getattr(rope, "scale", 0.0) * scaling["factor"] - 1) < 1e-6 for rope in ropes)
    else:
        is_applied = kind not in CLASS_NAMES or any(CLASS_NAMES[kind] in type(rope).__name__ for rope in ropes)
    if not is_applied:
        found = ", ".join(sorted({type(rope).__name__ for rope in ropes})) or "no rope"
        raise EngineFailed(f"the library's module of this family does not apply it: it has {found}")


def _is_scaled(rope: DeepseekV4RoPE) -> bool:
    """Return whether a rope of DeepSeek V4 has YaRN, the only scaling that it takes: no geometric progression."""
    ratios = rope._freqs[1:] / rope._freqs[:-1]
    return bool((ratios.max() > 1.001 * ratios.min()).item())


def fix_long_factors(language_model: Any, max_context_tokens: int) -> str | None:
    """Let longrope use one set of factors: the long one if the context exceeds the original one, else the short one.

    The library chooses in each forward by the longest row of the batch, so that a row's tokens would depend on its
    neighbours, and on the chunks of its prompt.

    Returns:
        "long" or "short", None without longrope.
    """
    chosen = None
    for rope in _ropes(language_model):
        if isinstance(rope, SuScaledRoPE):
            chosen = "long" if max_context_tokens > rope.original_max_position_embeddings else "short"
            rope.original_max_position_embeddings = 0 if chosen == "long" else 2**31 - 1
    return chosen


def bases_of(language_model: Any) -> set[float]:
    """Return the bases of the model's ropes; empty if one of them only keeps the frequencies derived from its base."""
    bases = [getattr(rope, "base", None) for rope in _ropes(language_model)]
    return {float(base) for base in bases if base} if all(bases) else set()


def dims_of(language_model: Any) -> set[int]:
    """Return how many dimensions of a head the model's ropes turn; empty if one of them does not tell."""
    dims = [getattr(rope, "dims", None) or getattr(rope, "dim", None) for rope in _ropes(language_model)]
    return {int(one) for one in dims if one} if all(dims) else set()


def _ropes(language_model: Any) -> Iterator[Any]:
    for _, module in language_model.named_modules():
        name = type(module).__name__
        if "RoPE" in name or "Rotary" in name:
            yield module
