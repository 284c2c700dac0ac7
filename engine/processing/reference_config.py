"""Resolves a config.json as transformers would: its own class of the family fills in defaults and layer patterns."""

import logging
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from json import dumps, loads
from typing import Any


def text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and nested else config


def reference_config(config: dict[str, Any]) -> Any | None:
    """Return transformers' configuration of the language model; None if it does not know the family or refuses it.

    Args:
        config: config.json.
    """
    section = text_section(config)
    return deepcopy(_resolved(str(section.get("model_type", config.get("model_type"))), dumps(section)))


def arithmetic_reference(config: dict[str, Any]) -> Any | None:
    """Return the configuration of `reference_config`, or one that is right for scalar fields alone.

    It is the latter if the validation of transformers refuses config.json: its defaults with the fields as they stand.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found, section = reference_config(config), text_section(config)
    family = str(section.get("model_type", config.get("model_type")))
    if found is not None or family not in CONFIG_MAPPING:
        return found
    made = CONFIG_MAPPING[family]()
    if made.get_text_config() is not made:
        return None
    for name, value in section.items():
        if name != "model_type" and hasattr(made, name):
            vars(made)[name] = value  # past the validation that refuses it
    return made


@lru_cache(maxsize=4)
def _resolved(family: str, section: str) -> Any | None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # a second, which most callers do not need

    if family not in CONFIG_MAPPING:
        return None
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of ids beside the vocabulary and other things that are not asked here
    fields = {name: value for name, value in loads(section).items() if name not in ("model_type", "per_layer_config")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = CONFIG_MAPPING[family](**fields).get_text_config()
    except Exception:  # its validation may raise anything
        return None
    finally:
        log.setLevel(level)
    sizes = [name for name in ("hidden_size", "num_hidden_layers") if name in fields]
    is_its_own = all(getattr(made, name, None) == fields[name] for name in sizes)
    return made if is_its_own else None  # else the family's whole config is meant, and this is a part of it


RECURRENT = "recurrent"
KINDS = {"linear_attention": RECURRENT, "mamba": RECURRENT, "conv": RECURRENT}
"""Kinds of layers in `layer_types` that keep no keys."""

WINDOWED_THROUGHOUT = ("minimax",)
"""Families with `layer_types` for which transformers applies `sliding_window` to all layers that keep keys."""

Reach = int | str | None
"""Tokens that a layer attends to: its window, None for all, RECURRENT for a layer without keys; see also
`pooled_reach`."""


def pooled_reach(window: int, ratio: int) -> str:
    """Return the reach of a layer that attends to a window, and to the tokens before it as pooled entries."""
    return f"{window} tokens and entries of {ratio} tokens each"


def declared_reaches(config: dict[str, Any]) -> list[Reach] | None:
    """Return the reach of each layer by config.json, as transformers resolves it; None if it does not tell."""
    section, reference = text_section(config), reference_config(config)
    if reference is None:
        return _raw_reaches(section)
    defaults = type(reference)()  # a field that a class does not know becomes an attribute as well
    if not any(hasattr(defaults, name) for name in ("layer_types", "sliding_window", "attention_chunk_size")):
        return None
    kinds, window = getattr(reference, "layer_types", None), getattr(reference, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * int(reference.num_hidden_layers)
    sizes: dict[str, Reach] = {
        "sliding_attention": window or None,
        "chunked_attention": getattr(reference, "attention_chunk_size", None),
    }
    if reference.model_type in WINDOWED_THROUGHOUT:
        sizes["full_attention"] = window or None
    for kind, ratio in (getattr(reference, "compress_rates", None) or {}).items():
        sizes[kind] = pooled_reach(int(reference.sliding_window), ratio)
    return [KINDS.get(kind, sizes.get(kind)) for kind in kinds]


def _raw_reaches(section: Mapping[str, Any]) -> list[Reach] | None:
    """Return the reaches of a family that transformers does not know, if config.json has a window for its layers."""
    window, kinds = section.get("sliding_window"), section.get("layer_types")
    is_used = section.get("use_sliding_window") is not False and isinstance(window, int) and window > 0
    if not is_used or not isinstance(kinds, list):
        return None
    return [KINDS.get(kind, window if kind == "sliding_attention" else None) for kind in kinds]
