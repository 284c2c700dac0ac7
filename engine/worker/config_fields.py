"""Refuses a checkpoint whose config.json asks for arithmetic that the library's module of its family does not do.

The libraries read the fields that they know and ignore all others without a word. What transformers reads for the same
family is the reference: a field that only it knows must have the value for which the library was written.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.protocol import EngineFailed
from engine.worker.language_model import config_of
from engine.worker.rope import bases_of

ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act")
SAME_ACTIVATION = {
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Names of the same function, up to rounding."""

ARITHMETIC = (
    *ACTIVATIONS,
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "decoder_sparse_step",
    "embedding_multiplier",
    "final_logit_softcapping",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "logit_scale",
    "logits_scaling",
    "mlp_only_layers",
    "n_group",
    "norm_eps",
    "norm_topk_prob",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_interleave",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "topk_group",
)
"""Fields that change logits but no shape of a weight: what changes shapes fails when the weights are loaded."""

UNREAD = frozenset(
    {
        ("cohere_compass_text", "hidden_act"),
        ("flint", "norm_topk_prob"),
        ("gemma4_text", "hidden_activation"),
        ("gemma4_unified_text", "hidden_activation"),
        ("glm4v_text", "hidden_act"),
        ("glm_ocr_text", "hidden_act"),
        ("hrm_text", "hidden_act"),
        ("kolibri1", "hidden_act"),
        ("lfm2_moe", "routed_scaling_factor"),
        ("llama4_text", "hidden_act"),
        ("muse_glimmer_text", "hidden_activation"),
        ("nemotron", "hidden_act"),
        ("qwen2", "hidden_act"),
        ("qwen3_5_text", "hidden_act"),
        ("qwen3_vl_moe_text", "hidden_act"),
        ("qwen3_vl_text", "hidden_act"),
        ("qwen4_exp_text", "hidden_act"),
    }
)
"""Fields that the library's classes have and its modules do not read."""

KNOWN_VALUES = {("gemma", "hidden_act"): ("gelu",)}
"""Values of published checkpoints that stand for the one of the library."""


def check_fields(language_model: Any, config: Mapping[str, Any]) -> None:
    """Check the fields of config.json that the library does not read.

    Args:
        language_model: The library's module; its weights need not be read.
        config: config.json, as the library has read it.

    Raises:
        EngineFailed: A field asks for other arithmetic; names it with both values.
    """
    nested = config.get("text_config")
    section = nested if isinstance(nested, dict) and nested else config
    family = section.get("model_type", config["model_type"])
    args = config_of(language_model)
    for name, value, computed in _ignored(family, section, args):
        raise EngineFailed(
            f"config.json has {name} {value!r}, but the library's module of the family {family} does not read it and "
            f"computes with {computed!r}; the answers would be wrong"
        )
    bases = bases_of(language_model)
    for name, base in _declared_bases(section):
        if bases and all(abs(base - other) > 1e-6 * other for other in bases):
            found = ", ".join(f"{other:g}" for other in sorted(bases))
            raise EngineFailed(
                f"config.json has {name} {base:g}, but the library's module of the family {family} does not read it "
                f"and computes with {found}; the answers would be wrong"
            )


def _ignored(family: str, section: Mapping[str, Any], args: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and expected value of the fields that the library ignores and that are not as it computes."""
    is_unread = {name: (family, name) in UNREAD or not hasattr(args, name) for name in ARITHMETIC}
    names = [name for name in ARITHMETIC if section.get(name) is not None and is_unread[name]]
    if not names or family not in CONFIG_MAPPING:
        return
    reference = CONFIG_MAPPING[family]()
    for name in names:
        if not hasattr(reference, name):
            continue  # transformers does not read it either
        value, expected = section[name], getattr(reference, name)
        if value not in KNOWN_VALUES.get((family, name), ()) and _same(value) != _same(expected):
            yield name, value, expected


def _same(value: Any) -> Any:
    return SAME_ACTIVATION.get(value, value) if isinstance(value, str) else value


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
