"""The context limit of a model: what its configuration declares, its rope scaling, and the configured options."""

import copy
from typing import Any

from engine.config import EngineConfig, RopeScaling
from engine.protocol import EngineFailed

DEFAULT_CONTEXT_TOKENS = 32768
"""Limit of a model whose configuration declares none."""

UNSCALED = (None, "default", "mrope", "proportional")
"""Values of `rope_type` that keep the frequencies of the trained context."""

LIMIT_IS_ORIGINAL = ("yarn", "deepseek_yarn", "telechat3-yarn")
"""Scalings that may be added to a config.json without raising max_position_embeddings, as for Qwen."""


def choose_context(config: EngineConfig, model_config: dict[str, Any]) -> int:
    """Return the most tokens of prompt and answer together.

    Args:
        config: Engine settings, of which `max_context_tokens` and `rope_scaling` count.
        model_config: The checkpoint's config.json.

    Raises:
        EngineFailed: `max_context_tokens` is beyond the limit, or `rope_scaling` cannot be applied.
    """
    scaling, wanted = config.rope_scaling, config.max_context_tokens
    if scaling is None and _declared_limit(model_config) is None:
        return wanted or DEFAULT_CONTEXT_TOKENS
    limit = context_limit(model_config) if scaling is None else int(scaling.factor * _original(scaling, model_config))
    if wanted is not None and wanted > limit:
        source = "the model's limit" if scaling is None else f"the limit with rope_scaling.factor {scaling.factor:g}"
        raise EngineFailed(
            f"max_context_tokens is {wanted}; {source} is {limit}. Reduce it, or set rope_scaling to go beyond the "
            f"trained context, with a factor of at least {wanted / limit * (scaling.factor if scaling else 1):.3g}"
        )
    return wanted or limit


def context_limit(model_config: dict[str, Any]) -> int:
    """Return the model's own limit, with the scaling of its own config.json. Raises EngineFailed."""
    declared = _declared_limit(model_config) or DEFAULT_CONTEXT_TOKENS
    scaled = [
        int(scaling["factor"] * scaling["original_max_position_embeddings"])
        for scaling in declared_scalings(model_config)
        if scaling["rope_type"] in LIMIT_IS_ORIGINAL and scaling.get("original_max_position_embeddings")
    ]
    return max(declared, *scaled) if scaled else declared


def library_config(config: EngineConfig, model_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as the libraries shall read it: with `rope_scaling` of the settings.

    transformers 5 writes base and scaling of the rope as `rope_parameters`, where many of the libraries' families read
    `rope_theta` and `rope_scaling` alone; these are derived from it. Multimodal ropes are read from `rope_parameters`.

    Raises:
        EngineFailed: `rope_scaling` cannot be applied to this model.
    """
    changed = copy.deepcopy(model_config)
    section = _text_section(changed)
    parameters = section.get("rope_parameters")
    if isinstance(parameters, dict) and not _is_nested(parameters) and "mrope_section" not in parameters:
        if "rope_theta" in parameters:
            section.setdefault("rope_theta", parameters["rope_theta"])
        if _rope_type(parameters) not in UNSCALED and not section.get("rope_scaling"):
            section["rope_scaling"] = {**parameters, "rope_type": _rope_type(parameters)}
    own, declared = section.get("rope_scaling"), _declared_limit(model_config)
    if isinstance(own, dict) and _rope_type(own) in LIMIT_IS_ORIGINAL and declared is not None:
        own.setdefault("original_max_position_embeddings", declared)  # as transformers; the libraries assume 4096
    if config.rope_scaling is not None:
        original = _original(config.rope_scaling, model_config)
        scaling = {
            "type": config.rope_scaling.type,
            "rope_type": config.rope_scaling.type,
            "factor": config.rope_scaling.factor,
            "original_max_position_embeddings": original,
        }
        section["rope_scaling"] = scaling
        if isinstance(parameters, dict):
            section["rope_parameters"] = {**parameters, **scaling}
    return changed


def declared_scalings(model_config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scalings of the rope that a config.json declares, each with its type as `rope_type`.

    There may be several, as `rope_parameters` may be given for each kind of layers.

    Raises:
        EngineFailed: A scaling that needs a factor has none.
    """
    section, found = _text_section(model_config), []
    for key in ("rope_scaling", "rope_parameters"):
        value = section.get(key)
        if isinstance(value, dict):
            found += [part for part in value.values() if isinstance(part, dict)] if _is_nested(value) else [value]
    scalings = [{**part, "rope_type": _rope_type(part)} for part in found if _rope_type(part) not in UNSCALED]
    for scaling in scalings:
        kind, factor = scaling["rope_type"], scaling.get("factor")
        if kind in ("linear", "llama3", *LIMIT_IS_ORIGINAL) and not (isinstance(factor, int | float) and factor > 0):
            raise EngineFailed(
                f"config.json: rope scaling {kind!r} has the factor {factor!r}; expected a number above 0"
            )
    return scalings


def _original(scaling: RopeScaling, model_config: dict[str, Any]) -> int:
    """Return the trained context that a scaling of the settings multiplies."""
    if own := declared_scalings(model_config):
        kind, factor = own[0]["rope_type"], own[0].get("factor")
        raise EngineFailed(
            f"rope_scaling: {scaling.type} cannot be applied: the model's config.json has a scaling of its own, {kind} "
            f"with the factor {factor}, and the model was trained with it. Remove the option."
        )
    declared, asked = _declared_limit(model_config), scaling.original_max_position_embeddings
    if declared is None and asked is None:
        raise EngineFailed(
            "rope_scaling: config.json has no max_position_embeddings; set "
            "rope_scaling.original_max_position_embeddings to the context that the model was trained for"
        )
    if declared is not None and asked is not None and asked > declared:
        raise EngineFailed(
            f"rope_scaling.original_max_position_embeddings is {asked}; the model was trained for {declared} tokens "
            "(max_position_embeddings)"
        )
    return asked or declared or DEFAULT_CONTEXT_TOKENS


def _declared_limit(model_config: dict[str, Any]) -> int | None:
    for section in (model_config.get("text_config"), model_config):
        limit = section.get("max_position_embeddings") if isinstance(section, dict) else None
        if limit is not None:
            if not isinstance(limit, int) or limit < 1:
                raise EngineFailed(f"config.json: max_position_embeddings is {limit!r}; expected a positive integer")
            return limit
    return None


def _text_section(model_config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the language model."""
    section = model_config.get("text_config")
    return section if isinstance(section, dict) and section else model_config


def _rope_type(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")


def _is_nested(parameters: dict[str, Any]) -> bool:
    """Return whether the parameters are given for each kind of layers."""
    return any(isinstance(value, dict) for value in parameters.values())
