"""Refuses a checkpoint whose config.json asks for arithmetic that the library's module of its family does not do.

The libraries read the fields that they know and ignore all others without a word. What transformers reads for the same
family is the reference: a field that only it knows must have the value for which the library was written, and one that
config.json leaves out must have the same default in both. Of a family that transformers does not know, a field that the
library does not read must have its neutral value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import EngineFailed
from engine.processing.reference_config import arithmetic_reference, reference_config, text_section
from engine.worker.language_model import config_of
from engine.worker.rope import bases_of, dims_of

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act")
SAME_NAME = {
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gready": "greedy",  # mlx-vlm's default for DeepSeek V2
}
"""Names of the same function, up to rounding."""

EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps")
"""Names of one thing: a family reads one of them."""

SWITCH = "attn_temperature_tuning"
"""A field that checkpoints of Llama 4 set to true or to 4, which means the same."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ACTIVATIONS, ("silu",)),
    **dict.fromkeys(EPSILONS, ()),
    "attention_in_multiplier": (1,),
    "attention_multiplier": (),
    "attention_out_multiplier": (1,),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (0,),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "embeddings_scale_by_sqrt_dim": (False,),
    "final_logit_softcapping": (0,),
    "full_attn_alpha_factor": (1,),
    "full_attn_beta_factor": (1,),
    "key_multiplier": (1,),
    "linear_attn_alpha_factor": (1,),
    "linear_attn_beta_factor": (1,),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_alpha_factor": (1,),
    "mlp_beta_factor": (1,),
    "mlp_multipliers": ([1, 1],),
    "mlp_only_layers": ([],),
    "moe_router_scaling_factor": (1,),
    "mup_enabled": (False,),
    "n_group": (0, 1),
    "norm_topk_prob": (),
    "position_embedding_type": ("rope", "rotary"),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (),
    "route_scale": (1,),
    "routed_scaling_factor": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_depth": (1,),
    "scale_emb": (1,),
    "scoring_func": (),
    "ssm_in_multiplier": (1,),
    "ssm_multipliers": ([1, 1, 1, 1, 1],),
    "ssm_out_multiplier": (1,),
    "swiglu_alpha": (),
    "swiglu_limit": (0,),
    "time_step_limit": ([0.0, float("inf")],),
    "topk_group": (0, 1),
    "topk_method": (),
}
"""Fields that change logits but no shape of a weight, with the values, beside None, that leave a module without the
field as it is. What changes shapes fails when the weights are loaded."""

ARITHMETIC = tuple(sorted(NEUTRAL))

UNREAD = frozenset(
    {
        ("cohere_compass_text", "hidden_act"),
        ("deepseek_v4", "hidden_act"),
        ("flint", "norm_topk_prob"),
        ("gemma4_text", "hidden_activation"),
        ("gemma4_unified_text", "hidden_activation"),
        ("glm4v_text", "hidden_act"),
        ("glm5_next_text", "hidden_act"),
        ("glm_ocr_text", "hidden_act"),
        ("hrm_text", "hidden_act"),
        ("hunyuan_vl", "hidden_act"),
        ("kimi_k25", "scoring_func"),
        ("kolibri1", "hidden_act"),
        ("lfm2_moe", "routed_scaling_factor"),
        ("llama4_text", "hidden_act"),
        ("minicpmo", "hidden_act"),
        ("minimax_m3", "hidden_act"),
        ("mistral_large3", "scoring_func"),
        ("molmo2", "hidden_act"),
        ("muse_glimmer_text", "hidden_activation"),
        ("nemotron", "hidden_act"),
        ("nemotron_labs_diffusion", "hidden_act"),
        ("paddleocr_vl", "hidden_act"),
        ("qwen2", "hidden_act"),
        ("qwen3_5_text", "hidden_act"),
        ("qwen3_vl_moe_text", "hidden_act"),
        ("qwen3_vl_text", "hidden_act"),
        ("qwen4_exp_text", "hidden_act"),
        ("spark2_5", "hidden_act"),
        ("xing4_0", "scoring_func"),
        ("youtu_vl", "rope_interleave"),
    }
)
"""Fields that the library's classes have and its modules do not read."""

INTERLEAVED = ("kimi_k25", "longcat_flash_ngram", "longcat_flash_sparse", "xing4_0", "youtu_llm", "youtu_vl")
"""Families that transformers does not know, with latent attention whose rope is always interleaved."""

COMPUTED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("bailing_moe_v3", "norm_topk_prob"): (True,),
    ("deepseek", "norm_topk_prob"): (False,),
    ("deepseek", "scoring_func"): ("softmax",),
    ("deepseek", "topk_method"): ("greedy",),
    ("hunyuan", "norm_topk_prob"): (False,),
    ("kimi_k25", "scoring_func"): ("sigmoid",),
    ("minimax_m3", "hidden_act"): ("swigluoai",),
    ("mistral_large3", "scoring_func"): ("sigmoid",),
    ("moondream3", "norm_topk_prob"): (True,),
    ("phixtral", "activation_function"): ("gelu_new",),
    ("phixtral", "layer_norm_eps"): (1e-5,),
    ("phixtral", "layer_norm_epsilon"): (1e-5,),
    ("rwkv7", "hidden_act"): ("sqrelu",),
    ("spark2_5", "hidden_act"): ("gelu",),
    ("xing4_0", "scoring_func"): ("sigmoid",),
    **dict.fromkeys(((family, "rope_interleave") for family in INTERLEAVED), (True,)),
}
"""Values for which a module is written, where they are neither the default of transformers nor the neutral ones."""


def check_fields(language_model: Any, config: dict[str, Any]) -> None:
    """Check the fields of config.json that the library does not read, and those that it reads and config.json lacks.

    Args:
        language_model: The library's module; its weights need not be read.
        config: config.json, as the library has read it.

    Raises:
        EngineFailed: A field asks for other arithmetic; names it with both values.
    """
    section = text_section(config)
    family = section.get("model_type", config["model_type"])
    check_arithmetic(family, section, config_of(language_model), arithmetic_reference(config))
    bases = bases_of(language_model)
    for name, base in _declared_bases(section):
        if bases and all(abs(base - other) > 1e-6 * other for other in bases):
            raise _refusal(family, name, f"{base:g}", ", ".join(f"{other:g}" for other in sorted(bases)))
    dims = dims_of(language_model)
    for name, factor, wanted in _declared_dims(section, reference_config(config)):
        if dims and wanted not in dims:
            found = ", ".join(map(str, sorted(dims)))
            raise _refusal(family, name, f"{factor:g} ({wanted} dimensions of a head)", found)


def check_arithmetic(family: str, section: Mapping[str, Any], args: Any, reference: Any | None) -> None:
    """Check the fields of ARITHMETIC.

    Args:
        family: `model_type` of the section.
        section: The part of config.json that describes the language model.
        args: The library's configuration.
        reference: transformers' configuration; None if it does not know the family.

    Raises:
        EngineFailed: See `check_fields`.
    """
    if section.get("per_layer_config"):
        raise _refusal(family, "per_layer_config", repr(section["per_layer_config"]), "the same fields in all layers")
    defaults = None if reference is None else type(reference)()
    reads_epsilon = any(hasattr(args, name) for name in EPSILONS)
    for name in ARITHMETIC:
        if reference is not None:
            if not hasattr(reference, name) or not hasattr(defaults, name):
                continue  # transformers does not read it
            value = getattr(reference, name)
        else:
            value = section.get(name)
        if not is_read(family, name, args):
            if section.get(name) is None:
                continue
            computed = computed_values(family, name, reference)
            is_other_epsilon = reference is None and reads_epsilon and name in EPSILONS
            if not is_other_epsilon and not any(_are_same(name, value, one) for one in computed):
                raise _refusal(family, name, repr(value), " or ".join(map(repr, computed)) or "a value of its own")
        elif reference is not None and name not in section and not _are_same(name, value, getattr(args, name)):
            raise EngineFailed(
                f"config.json has no {name}, for which transformers takes {value!r}, but the library's module of the "
                f"family {family} computes with {getattr(args, name)!r}; the answers would be wrong"
            )


def is_read(family: str, name: str, args: Any) -> bool:
    """Return whether the library's module reads a field. args: the library's configuration."""
    return hasattr(args, name) and (family, name) not in UNREAD


def computed_values(family: str, name: str, reference: Any | None) -> tuple[Any, ...]:
    """Return the values of a field that the library does not read with which its module computes."""
    if (family, name) in COMPUTED:
        return COMPUTED[family, name]
    return (None, *NEUTRAL[name]) if reference is None else (getattr(type(reference)(), name),)


def _refusal(family: str, name: str, value: str, computed: str) -> EngineFailed:
    return EngineFailed(
        f"config.json has {name} {value}, but the library's module of the family {family} does not read it and "
        f"computes with {computed}; the answers would be wrong"
    )


def _are_same(name: str, one: Any, other: Any) -> bool:
    values = [SAME_NAME.get(value, value) if isinstance(value, str) else value for value in (one, other)]
    values = [list(value) if isinstance(value, tuple) else value for value in values]
    if name == SWITCH:
        values = [bool(value) for value in values]
    neutral = (None, *NEUTRAL[name])
    return values[0] == values[1] or all(value in neutral for value in values)


def _declared_bases(section: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each base of the rope that config.json declares."""
    parameters = section.get("rope_parameters")
    parts = parameters if isinstance(parameters, dict) else {}
    nested = {f"rope_parameters.{kind}": part for kind, part in parts.items() if isinstance(part, dict)}
    found = {f"{path}.rope_theta": part.get("rope_theta") for path, part in nested.items()}
    if "rope_theta" in parts:
        found["rope_parameters.rope_theta"] = parts["rope_theta"]
    elif not nested:
        found["rope_theta"] = section.get("rope_theta")
    found["rope_local_base_freq"] = section.get("rope_local_base_freq")
    yield from ((name, float(base)) for name, base in found.items() if isinstance(base, int | float))


def _declared_dims(section: Mapping[str, Any], reference: Any | None) -> Iterator[tuple[str, float, int]]:
    """Yield name, value and dimensions of each share of a head that the rope turns."""
    parts = section.get("rope_parameters")
    parts = parts if isinstance(parts, dict) else {}
    declared = {
        "rope_parameters.partial_rotary_factor": parts.get("partial_rotary_factor"),
        "partial_rotary_factor": section.get("partial_rotary_factor"),
        "rotary_pct": section.get("rotary_pct"),
    }
    theirs = getattr(reference, "rope_parameters", None) or {}
    declared["rope_parameters of transformers"] = theirs.get("partial_rotary_factor")
    name, factor = next(((name, one) for name, one in declared.items() if isinstance(one, int | float)), ("", None))
    source = section if reference is None else vars(reference)
    heads = source.get("num_attention_heads")
    size = source.get("head_dim") or (source["hidden_size"] // heads if heads else None)
    is_latent = section.get("kv_lora_rank") is not None  # the rope turns a part of its own
    if factor is not None and size and not is_latent and _kind(parts) != "proportional":
        yield name, factor, int(size * factor)


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")
