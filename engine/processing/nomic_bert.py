"""The config.json of NomicBERT, by the names of transformers and by those of the published code (GPT-2's)."""

from typing import Any

NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
}
"""Published name -> that of transformers."""

PUBLISHED_DEFAULTS = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "type_vocab_size": 0}
"""The published code's defaults of fields that a config.json with its names leaves out."""

PUBLISHED_BASE = 10000.0
"""Base of the rope that the published code assumes."""

ONLY_WITH: dict[str, tuple[Any, Any]] = {
    "activation_function": ("swiglu", "gelu_new"),
    "causal": (False, False),
    "mlp_fc1_bias": (False, True),
    "mlp_fc2_bias": (False, True),
    "moe_every_n_layers": (0, 0),
    "parallel_block": (False, False),
    "parallel_block_tied_norm": (False, False),
    "prenorm": (False, False),
    "qkv_proj_bias": (False, True),
    "rotary_emb_fraction": (1.0, 0.0),
    "rotary_emb_interleaved": (False, False),
    "rotary_emb_scale_base": (None, None),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "scale_attn_weights": (True, True),
    "use_rms_norm": (False, False),
}
"""Fields of the published code that change the arithmetic -> the value that is computed, and the code's default."""

CODE = frozenset(
    (
        "configuration_hf_nomic_bert.NomicBertConfig",
        "modeling_hf_nomic_bert.NomicBertForPreTraining",
        "modeling_hf_nomic_bert.NomicBertForSequenceClassification",
        "modeling_hf_nomic_bert.NomicBertModel",
    )
)
"""The classes that published checkpoints name in `auto_map`, which transformers would run: those computed here."""

DYNAMIC = "dynamic"
"""`rope_type` of the dynamic NTK scaling, which the published code calls `rotary_scaling_factor`."""


def is_published_form(config: dict[str, Any]) -> bool:
    """Return whether a config.json has the names of the published code, perhaps beside those of transformers."""
    return "n_embd" in config


def names_known_code(auto_map: Any) -> bool:
    """Return whether an `auto_map` names nothing but CODE, in the checkpoint or in another repository."""
    return isinstance(auto_map, dict) and all(str(name).rpartition("--")[2] in CODE for name in auto_map.values())


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json by the names of transformers, with `rope_parameters`.

    Args:
        config: config.json, for which `nomic_refusal` returns None.
    """
    native = dict(config)
    for published, name in NAMES.items():
        if published in config:
            native.setdefault(name, config[published])
    rope = dict(config.get("rope_parameters") or {})
    if is_published_form(config):
        native = PUBLISHED_DEFAULTS | native
        rope.setdefault("rope_theta", config.get("rotary_emb_base", PUBLISHED_BASE))
    elif "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    rope |= {"rope_type": "default", **_scaling(config)}
    return {name: value for name, value in native.items() if name != "rope_scaling"} | {"rope_parameters": rope}


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_type` and `factor` that a config.json declares, {} for neither."""
    found: dict[str, Any] = {}
    for part in (config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(part, dict) and (kind := part.get("rope_type", part.get("type"))) is not None:
            found |= {"rope_type": kind, **({"factor": part["factor"]} if "factor" in part else {})}
    if (factor := config.get("rotary_scaling_factor")) is not None:
        found |= {"rope_type": DYNAMIC, "factor": factor}
    return found


def num_positions(config: dict[str, Any]) -> Any:
    """Return the most tokens of a text: those of the training, with the dynamic NTK scaling those that it is for.

    The latter are `n_positions`, else the factor times the former. None if config.json does not tell.
    """
    native = native_config(config)
    rope, trained = native["rope_parameters"], native.get("max_position_embeddings")
    if rope["rope_type"] != DYNAMIC or type(trained) is not int or not _is_factor(rope.get("factor")):
        return trained
    declared = config.get("n_positions")
    return max(trained, declared) if type(declared) is int else int(rope["factor"] * trained)


def nomic_refusal(config: dict[str, Any]) -> str | None:
    """Return why a config.json has another arithmetic than the engine's, None if it has not."""
    for published, name in NAMES.items():
        if published in config and name in config and config[published] != config[name]:
            return f"config.json has {published} {config[published]!r} and {name} {config[name]!r}; they must be equal"
    for name, (computed, default) in ONLY_WITH.items():
        value = config.get(name, default if is_published_form(config) else computed)
        if value != computed and (value or computed):
            return f"config.json has {name} {value!r}; supported is {computed!r}"
    return _rope_refusal(config)


def _rope_refusal(config: dict[str, Any]) -> str | None:
    nested = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if not isinstance(nested, dict) or not isinstance(scaling, dict):
        return f"config.json has rope_parameters {nested!r} and rope_scaling {scaling!r}; they must be objects"
    bases = {
        name: float(value)
        for name, value in {
            "rotary_emb_base": config.get("rotary_emb_base"),
            "rope_theta": config.get("rope_theta"),
            "rope_parameters.rope_theta": nested.get("rope_theta"),
        }.items()
        if isinstance(value, int | float)
    }
    if len(set(bases.values())) > 1:
        return f"config.json has several bases of the rope, {bases}; they must be equal"
    for part in (config, nested):
        if (share := part.get("partial_rotary_factor", 1.0)) != 1.0:
            return f"config.json has partial_rotary_factor {share!r}; supported is 1.0"
    kinds = [kind for part in (nested, scaling) if (kind := part.get("rope_type", part.get("type"))) is not None]
    factors = [part["factor"] for part in (nested, scaling) if part.get("factor") is not None]
    if (factor := config.get("rotary_scaling_factor")) is not None:
        kinds, factors = [*kinds, DYNAMIC], [*factors, factor]
    if any(kind != kinds[0] for kind in kinds) or any(factor != factors[0] for factor in factors):
        return f"config.json has the ropes {kinds} with the factors {factors}; they must be one"
    if kinds and kinds[0] not in ("default", DYNAMIC):
        return f"config.json has a rope of the type {kinds[0]!r}; supported are default and {DYNAMIC}"
    if DYNAMIC in kinds and not (factors and _is_factor(factors[0])):
        return f"config.json has a dynamic rope with the factors {factors}; it must have one of at least 1"
    return None


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 1
