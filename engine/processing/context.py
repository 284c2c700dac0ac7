"""The context limit of a model: what its configuration declares, its rope scaling, and the configured options."""

import copy
from typing import Any

from engine.config import EngineConfig, RopeScaling
from engine.errors import EngineFailed
from engine.processing.encoders import declared_positions, num_unused_positions
from engine.processing.reference_config import declared_reaches, reference_config, text_section

DEFAULT_CONTEXT_TOKENS = 32768
"""Limit of a model whose configuration declares none."""

UNSCALED = (None, "default", "mrope", "proportional")
"""Values of `rope_type` that keep the frequencies of the trained context."""

LIMIT_IS_ORIGINAL = ("yarn", "deepseek_yarn", "telechat3-yarn")
"""Scalings that may be added to a config.json without raising max_position_embeddings, as for Qwen."""

WINDOWS_IGNORED = frozenset(
    {
        *("dots1", "gemma2", "llama4_text", "minimax", "mistral", "mixtral", "nemotron_h", "phi3", "phimoe", "qwen2"),
        *(
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "qwen2_moe",
            "qwen2_vl",
            "qwen2_vl_text",
            "qwen3",
            "qwen3_moe",
            "qwen3_vl_moe_text",
            "smollm3",
            "starcoder2",
        ),
    }
)
"""Families for which the libraries ignore `sliding_window` or `attention_chunk_size`: their attention sees all tokens,
which is right as long as there are no more than the window has."""

WINDOWS_APPLIED = frozenset(("llama4", "paligemma"))
"""Families whose module applies what the module of their language model alone ignores."""

REACH = "sliding_window, attention_chunk_size or floor_scale"
"""Fields of config.json that limit a context."""

MOLMO_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": "n_kv_heads",
}
"""Names of Molmo's sizes in mlx-vlm by those of its published config.json."""

KIMI_K25_TOWERS = ("", "kimi_k25", "kimi_k25_vision")
"""Names in config.json of Kimi K2.5's vision tower, which mlx-vlm calls moonvit; published files leave it empty."""

KIMI_K25_NAMES = {
    "depth": ("vt_num_hidden_layers", "num_hidden_layers"),
    "embed_dim": ("vt_hidden_size", "hidden_size"),
    "hidden_size": ("vt_hidden_size",),
    "init_pos_emb_height": ("pos_emb_height",),
    "init_pos_emb_width": ("pos_emb_width",),
    "intermediate_size": ("vt_intermediate_size",),
    "num_heads": ("vt_num_attention_heads", "num_attention_heads"),
}
"""Names of the sizes of that tower in mlx-vlm, and those of published files and of transformers."""

LIBRARY_DEFAULTS: dict[str, dict[str, Any]] = {"granitemoehybrid": {"time_step_limit": [0.0, float("inf")]}}
"""transformers' defaults by family where mlx-vlm has others and published checkpoints leave the field out."""


def choose_context(config: EngineConfig, model_config: dict[str, Any]) -> int:
    """Return the most tokens of prompt and answer together.

    Args:
        config: Engine settings, of which `max_context_tokens` and `rope_scaling` count.
        model_config: The checkpoint's config.json.

    Raises:
        EngineFailed: `max_context_tokens` is beyond the limit, or `rope_scaling` cannot be applied.
    """
    scaling, wanted = config.rope_scaling, config.max_context_tokens
    window = ignored_window(model_config)
    if window is not None and wanted is not None and wanted > window:
        raise EngineFailed(
            f"max_context_tokens is {wanted}; by config.json attention sees {window} tokens ({REACH}), but the "
            f"library's module of {text_section(model_config).get('model_type')} lets it see all, so that more "
            f"would be computed wrong. Reduce it to {window}"
        )
    most = window or 2**63
    if scaling is None and _declared_limit(model_config) is None:
        return wanted or min(DEFAULT_CONTEXT_TOKENS, most)
    limit = context_limit(model_config) if scaling is None else int(scaling.factor * _original(scaling, model_config))
    if wanted is not None and wanted > limit:
        source = "the model's limit" if scaling is None else f"the limit with rope_scaling.factor {scaling.factor:g}"
        raise EngineFailed(
            f"max_context_tokens is {wanted}; {source} is {limit}. Reduce it, or set rope_scaling to go beyond the "
            f"trained context, with a factor of at least {wanted / limit * (scaling.factor if scaling else 1):.3g}"
        )
    return wanted or min(limit, most)


def ignored_window(model_config: dict[str, Any]) -> int | None:
    """Return the window of config.json where the libraries' attention sees all tokens; None without such a window."""
    section = text_section(model_config)
    family = section.get("model_type", model_config.get("model_type"))
    if family not in WINDOWS_IGNORED or model_config.get("model_type") in WINDOWS_APPLIED:
        return None
    windows = [reach for reach in declared_reaches(model_config) or () if isinstance(reach, int)]
    reference = reference_config(model_config)
    if (
        reference is not None
        and getattr(reference, "attn_temperature_tuning", False)
        and not all(reference.no_rope_layers)
    ):
        windows.append(reference.floor_scale - 1)  # queries of later tokens are scaled
    return min(windows, default=None)


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

    transformers 5 writes base, share and scaling of the rope as `rope_parameters`, where many of the libraries'
    families read `rope_theta`, `partial_rotary_factor` and `rope_scaling` alone; these are derived from it. Multimodal
    ropes are read from `rope_parameters`.

    Raises:
        EngineFailed: `rope_scaling` cannot be applied to this model.
    """
    changed = copy.deepcopy(model_config)
    _set_molmo_text(changed)
    _set_kimi_k25_tower(changed)
    section = text_section(changed)
    parameters = section.get("rope_parameters")
    _set_gemma3_base(section)
    _set_deepseek_v4_ropes(section)
    for name, default in LIBRARY_DEFAULTS.get(str(section.get("model_type")), {}).items():
        section.setdefault(name, default)
    if isinstance(parameters, dict) and not _is_nested(parameters) and "mrope_section" not in parameters:
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in parameters:
                section.setdefault(name, parameters[name])
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


def _set_molmo_text(config: dict[str, Any]) -> None:
    """Give a config.json of Molmo, which has the language model's sizes at the top, the part that mlx-vlm reads."""
    if config.get("model_type") == "molmo" and not config.get("text_config") and "hidden_size" in config:
        fields = {name: value for name, value in config.items() if not isinstance(value, dict)}
        config["text_config"] = fields | {MOLMO_NAMES[name]: fields[name] for name in MOLMO_NAMES if name in fields}


def _set_kimi_k25_tower(config: dict[str, Any]) -> None:
    """Name the tower of Kimi K2.5, which published files do not, and its sizes as mlx-vlm reads them."""
    vision = config.get("vision_config")
    if config.get("model_type") != "kimi_k25" or not isinstance(vision, dict):
        return
    if vision.get("model_type") in KIMI_K25_TOWERS:
        vision["model_type"] = "moonvit"
    for name, names in KIMI_K25_NAMES.items():
        given = next((vision[own] for own in names if own in vision), None)
        if given is not None:
            vision.setdefault(name, given)


def _set_gemma3_base(section: dict[str, Any]) -> None:
    """Name the base of the global layers' rope as mlx-vlm reads it for Gemma 3, which no checkpoint does."""
    if section.get("model_type") != "gemma3_text":
        return
    parameters = section.get("rope_parameters")
    nested = parameters if isinstance(parameters, dict) and _is_nested(parameters) else {}
    bases = {
        "rope_global_base_freq": nested.get("full_attention", {}).get("rope_theta", section.get("rope_theta")),
        "rope_local_base_freq": nested.get("sliding_attention", {}).get("rope_theta"),
    }
    for name, base in bases.items():
        if base is not None:
            section.setdefault(name, base)


def _set_deepseek_v4_ropes(section: dict[str, Any]) -> None:
    """Name bases and scaling as mlx-vlm reads them for DeepSeek V4, of which transformers 5 writes one per rope."""
    parameters = section.get("rope_parameters")
    if section.get("model_type") != "deepseek_v4" or not isinstance(parameters, dict) or not _is_nested(parameters):
        return
    compress = parameters.get("compress", {})
    bases = {"rope_theta": parameters.get("main", {}), "compress_rope_theta": compress}
    section |= {name: part["rope_theta"] for name, part in bases.items() if "rope_theta" in part}
    if _rope_type(compress) not in UNSCALED:
        section["rope_scaling"] = dict(compress)


def declared_scalings(model_config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scalings of the rope that a config.json declares, each with its type as `rope_type`.

    There may be several, as `rope_parameters` may be given for each kind of layers.

    Raises:
        EngineFailed: A scaling that needs a factor has none.
    """
    section, found = text_section(model_config), []
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
        limit = declared_positions(section) if isinstance(section, dict) else None
        if limit is not None:
            if not isinstance(limit, int) or limit < 1:
                raise EngineFailed(f"config.json: max_position_embeddings is {limit!r}; expected a positive integer")
            return max(1, limit - num_unused_positions(model_config))
    return None


def _rope_type(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")


def _is_nested(parameters: dict[str, Any]) -> bool:
    """Return whether the parameters are given for each kind of layers."""
    return any(isinstance(value, dict) for value in parameters.values())
