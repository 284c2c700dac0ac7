"""Tells from a model's structure, before a weight is read, whether its family can be served."""

import inspect
from importlib.metadata import version
from typing import Any

from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import get_model_and_args

from engine.processing.encoders import CLASSIFIER
from engine.worker import mlx_lm_families
from engine.worker.layer_caches import unserved_reason

VISION_MODULES = ("vision_tower", "vision_model", "vision", "visual")
"""Names of a model's vision tower; the library sets it to None if the checkpoint has no weights for it."""


def unsupported_reason(module: Any, media_kinds: frozenset[str]) -> str | None:
    """Return why a loaded model cannot be served and what would work instead, None if it can be.

    Args:
        module: The library's model; its weights need not be read.
        media_kinds: Media that the checkpoint's configuration declares.
    """
    language_model = getattr(module, "language_model", None)
    if language_model is None:
        return "it has no language model that generates text; use a checkpoint of a generative model"
    if "cache" not in inspect.signature(type(language_model).__call__).parameters:
        return "its language model takes no cache, so it cannot continue a text token by token"
    if not (hasattr(language_model, "make_cache") or hasattr(language_model, "layers")):
        return "its language model tells neither its layers nor their caches"
    if (reason := unserved_reason(make_prompt_cache(language_model))) is not None:
        return reason
    if "image" in media_kinds and all(getattr(module, name, None) is None for name in VISION_MODULES):
        return (
            "its config.json has a vision_config, but the checkpoint has no weights of a vision tower; use a complete "
            "checkpoint, or remove vision_config and preprocessor_config.json to serve it as a text model"
        )
    return None


def unknown_reason(config: dict[str, Any]) -> str | None:
    """Return why the library cannot build a checkpoint's model, None if it can.

    Args:
        config: The checkpoint's config.json.
    """
    if not isinstance(config.get("model_type"), str):
        return "config.json has no model_type"
    named = config.get("architectures")
    for architecture in named if isinstance(named, list) else ():
        if str(architecture).endswith(CLASSIFIER):
            return (
                f"{architecture} has an output layer for classes, which mlx-vlm {version('mlx-vlm')} builds for "
                "encoders alone; causal rerankers with a LogitScore in modules.json, such as Qwen3-Reranker, are served"
            )
    mlx_lm_families.register(config["model_type"])
    try:
        get_model_and_args(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        why = "does not implement it" if isinstance(error, ValueError) else f"cannot build it: {error}"
        return f"mlx-vlm {version('mlx-vlm')} {why}; use a checkpoint of another family"
    return None


def bidirectional_reason(config: dict[str, Any]) -> str | None:
    """Return why a checkpoint cannot be served if its tokens see those after them, None if they do not.

    The library's generative module of the same family would compute it with a causal mask, without an error.

    Args:
        config: The checkpoint's config.json.
    """
    for section in (config.get("text_config"), config):
        if isinstance(section, dict):
            if section.get("use_bidirectional_attention") in (True, "all"):
                return _bidirectional("use_bidirectional_attention", section["use_bidirectional_attention"])
            if section.get("is_causal") is False:
                return _bidirectional("is_causal", False)
    return None


def _bidirectional(key: str, value: Any) -> str:
    return (
        f"its attention is bidirectional ({key} is {value!r} in config.json), and prompts are computed in chunks, each "
        "of which sees only the tokens before it; embeddings of causal models, such as Qwen3-Embedding, are served"
    )
