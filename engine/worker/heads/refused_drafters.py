"""Drafters of mlx-vlm that do not draft here, by the name of the library's module, with the reasons."""

from typing import Any

DRAFT_BY_DRAFT = "each of its drafts changes the logits of the next one, and a block is sampled at once here"
REFUSED = {
    "deepseek_v4_dspark": DRAFT_BY_DRAFT,
    "dflash2": "its layers have convolutions, and a selector chooses each draft by the one before it",
    "dspark": DRAFT_BY_DRAFT,
    "gemma4_dflash": "the embeddings of Gemma 4 have a scale, which a DFlash drafter here does not apply",
    "gemma4_dspark": DRAFT_BY_DRAFT,
    "inkling_mtp": "the model's own text is not served",
    "laguna_dflash": "its attention has gates, which a DFlash drafter here does not have",
    "muse_glimmer_assistant": "it reads embeddings without the norm that the model applies to its own",
    "qwen3_dspark": DRAFT_BY_DRAFT,
}
ARCHITECTURES = {"Gemma4DSparkModel": "gemma4_dspark", "Qwen3DSparkModel": "qwen3_dspark"}
"""Names by which drafters are known that have the model_type of their layers."""


def refused_drafter(config: dict[str, Any]) -> str | None:
    """Return the name and the reason of a drafter that is refused, None for any other.

    Drafters with a section for DFlash are refused with the field in question; see heads/dflash_config.py.

    Args:
        config: Its config.json.
    """
    named = config.get("architectures")
    found = [
        config.get("model_type"),
        *(ARCHITECTURES.get(str(one)) for one in (named if isinstance(named, list) else ())),
    ]
    name = next((str(one) for one in found if one in REFUSED), None)
    return None if name is None else f"{name}: {REFUSED[name]}"
