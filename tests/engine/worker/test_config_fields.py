"""Fields of a config.json that decide about arithmetic change the logits, or the checkpoint is refused by name."""

import copy
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.context import choose_context, ignored_window, library_config
from engine.processing.reference_config import arithmetic_reference, declared_reaches
from engine.worker.config_fields import (
    ACTIVATIONS,
    ARITHMETIC,
    COMPUTED,
    EPSILONS,
    NEUTRAL,
    UNREAD,
    check_fields,
    is_read,
)
from engine.worker.language_model import config_of
from engine.worker.patches import families
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import given_positions, new_module, prompt

UNQUANTIZED = [name for name, family in FAMILIES.items() if family.quantization is None]
STRUCTURAL = {"decoder_sparse_step", "mlp_only_layers", "n_group", "topk_group", "topk_method"}
"""Fields that other fields have to agree with."""
WITHOUT_ROPE = {
    "gpt2",
    "gpt_bigcode",
    "glm5_next_text",
    "jamba",
    "kimi_linear",
    "mamba",
    "mamba2",
    "nemotron_h",
    "rwkv7",
}
FROM_PARAMETERS = {"gemma4_text", "gemma4_unified_text", "mellum"}
"""Families that have read their bases from `rope_parameters` since they came out."""


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def family_of(config: dict[str, Any]) -> str:
    return section_of(config).get("model_type", config["model_type"])


def module(config: dict[str, Any], weights: dict[str, mx.array] | None = None) -> Any:
    families.correct()
    made = new_module(library_config(EngineConfig(), config)).language_model
    made.load_weights(list((weights or {}).items()), strict=False)
    return made


def drawn(made: Any) -> dict[str, mx.array]:
    """Random weights; those of norms and biases are not 0 or 1 either."""
    parameters: Any = tree_flatten(made.parameters())
    named = [(name, weight) for name, weight in parameters if weight.dtype == mx.float32]
    return {name: 0.3 * mx.random.normal(weight.shape, key=mx.random.key(i)) for i, (name, weight) in enumerate(named)}


def logits(made: Any) -> np.ndarray:
    ids = mx.array([prompt(24)])
    return np.array(made(ids, cache=make_prompt_cache(made), **given_positions(made, 0, 24)).logits)


def refusal(made: Any, config: dict[str, Any]) -> str:
    try:
        check_fields(made, library_config(EngineConfig(), config))
    except EngineFailed as error:
        return str(error)
    return ""


OTHER_NAMES: dict[str, tuple[Any, Any]] = {
    "position_embedding_type": ("nope", "rope"),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"),
    "time_step_limit": ([0.5, 0.6], [0.4, 0.5]),
}
"""Two values of each field that is neither a number nor true or false."""


def changes(config: dict[str, Any], args: Any) -> dict[str, Any]:
    """Another value of each field that transformers reads for the family or, if it does not know it, of each field."""
    section, reference = section_of(config), arithmetic_reference(config)
    found: dict[str, Any] = {}
    for name in ARITHMETIC:
        if name in STRUCTURAL or (reference is not None and not hasattr(type(reference)(), name)):
            continue
        value = section.get(name, getattr(args, name, None) if reference is None else getattr(reference, name))
        computed = COMPUTED.get((family_of(config), name), ())
        if name in ACTIVATIONS:
            found[name] = "relu" if value != "relu" else "silu"
        elif name in OTHER_NAMES:
            found[name] = next(other for other in OTHER_NAMES[name] if other not in (value, *computed))
        elif isinstance(value, bool) or any(isinstance(one, bool) for one in NEUTRAL[name]):
            found[name] = not value if value is not None else not NEUTRAL[name][0]
        elif isinstance(value, int | float | None):
            found[name] = 3 * value if value else 2.0
        else:
            found[name] = [3 * one for one in value]
    if family_of(config) not in WITHOUT_ROPE | FROM_PARAMETERS and reference is not None:
        found["rope_theta"] = 33333.0
    return found


STRICT = {"glm_ocr"}
"""Families for which the library refuses fields that it does not know, such as `sliding_window`."""

KNOWN = [name for name in UNQUANTIZED if family_of(FAMILIES[name].config) in CONFIG_MAPPING]
"""Families that transformers knows."""


GATE = (
    "llama",
    "gpt2",
    "gemma2",
    "granite",
    "deepseek_v3",
    "falcon_h1",
    "nemotron_h",
    "internlm2",
    "minicpm",
    "bailing_moe",
)


@pytest.mark.parametrize("name", some_at_night(UNQUANTIZED, GATE, "the gate has ten families with unlike fields"))
def test_a_changed_field_changes_the_logits_or_is_refused(name: str):
    config = FAMILIES[name].config
    plain = module(config)
    weights = drawn(plain)
    plain.load_weights(list(weights.items()), strict=False)
    before, family = logits(plain), family_of(config)
    assert not refusal(plain, config), "as it is, it is served"
    for field, value in changes(config, config_of(plain)).items():
        other = copy.deepcopy(config)
        section_of(other)[field] = value
        if field == "rope_theta" and "rope_parameters" in section_of(other):
            section_of(other)["rope_parameters"][field] = value
        try:
            changed = module(other, weights)
        except (ValueError, TypeError):
            continue  # the library refuses it
        if found := refusal(changed, other):
            assert f"config.json has {field} " in found and "does not read it and computes with" in found
        elif field == "rope_theta" or is_read(family, field, config_of(changed)):
            is_changed = not np.array_equal(logits(changed), before)
            assert is_changed or field in FOLDED.get(name, ()) or (family, field) in WITHOUT_EFFECT, field
        else:
            assert np.array_equal(logits(changed), before), f"{field} is read by another name"
            before_it, with_it = arithmetic_reference(config), arithmetic_reference(other)
            is_ignored_there = before_it is not None and getattr(before_it, field) == getattr(with_it, field)
            assert is_ignored_there or field in EPSILONS, f"{field} is ignored"


WITHOUT_EFFECT: dict[tuple[str, str], str] = {
    ("youtu_vl", name): "it has no experts" for name in ("norm_topk_prob", "routed_scaling_factor", "scoring_func")
}
"""Fields that a module reads and that change nothing in the tiny checkpoint, with the reason."""

FOLDED = {"falcon_h1": tuple(name for name in ARITHMETIC if "_multiplier" in name)}
"""Fields that the library multiplies into weights when it reads them."""


def test_fields_that_the_library_has_and_does_not_read_are_refused():
    for family, field in UNREAD:
        [config, *_] = [one.config for one in FAMILIES.values() if family_of(one.config) == family]
        section_of(config := copy.deepcopy(config))[field] = "relu" if field in ACTIVATIONS else 3.0
        assert field in refusal(module(config), config), family


def with_fields(name: str, **fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(FAMILIES[name].config)
    section_of(config).update(fields)
    return config


def test_a_field_that_is_left_out_must_have_the_same_default_in_both():
    config = copy.deepcopy(FAMILIES["gemma2"].config)
    del config["query_pre_attn_scalar"]
    assert refusal(module(config), config) == (
        "config.json has no query_pre_attn_scalar, for which transformers takes 256, but the library's module of the "
        "family gemma2 computes with 144.0; the answers would be wrong"
    )


def test_an_activation_that_the_module_does_not_compute_with_is_refused():
    config = with_fields("minimax_m3", hidden_act="silu")
    assert refusal(module(config), config) == (
        "config.json has hidden_act 'silu', but the library's module of the family minimax_m3 does not read it and "
        "computes with 'swigluoai'; the answers would be wrong"
    )
    served = with_fields("minimax_m3", hidden_act="swigluoai")
    assert not refusal(module(served), served)


def test_fields_that_differ_by_layer_are_refused():
    config = with_fields("llama", per_layer_config={"0": {"rms_norm_eps": 1e-3}})
    assert "config.json has per_layer_config {'0': " in refusal(module(config), config)


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize(("name", "share"), [("phi", 0.25), ("phi3", 0.5), ("nemotron", 0.25), ("glm", 0.5)])
def test_the_rope_turns_the_share_of_a_head_that_config_json_names(name: str, share: float, form: str):
    config = copy.deepcopy(FAMILIES[name].config)
    config.pop("partial_rotary_factor", None)
    if form == "old":
        config["partial_rotary_factor"] = share
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    made = module(config)
    dims = {rope.dims for _, rope in made.named_modules() if type(rope).__name__ == "RoPE"}
    assert dims == {int(16 * share)} and not refusal(made, config)


def test_a_share_of_the_rope_that_the_module_does_not_read_is_refused():
    config = with_fields("glm", partial_rotary_factor=0.25)
    assert "config.json has partial_rotary_factor 0.25 (4 dimensions of a head)" in refusal(module(config), config)
    config = with_fields("internlm2", partial_rotary_factor=0.25)
    assert "internlm2 does not read it and computes with 16" in refusal(module(config), config)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_the_bases_of_both_ropes_of_gemma_3_are_those_of_the_checkpoint(name: str, form: str):
    config = copy.deepcopy(FAMILIES[name].config)
    section = section_of(config)
    if form == "old":
        section |= {"rope_theta": 77777.0, "rope_local_base_freq": 333.0}
    else:
        del section["rope_theta"]
        kinds = {"full_attention": 77777.0, "sliding_attention": 333.0}
        section["rope_parameters"] = {
            kind: {"rope_theta": base, "rope_type": "default"} for kind, base in kinds.items()
        }
    made = module(config)
    layers = zip(made.layers, make_prompt_cache(made), strict=True)
    found = {isinstance(cache, RotatingKVCache): layer.self_attn.rope.base for layer, cache in layers}
    assert found == {True: 333.0, False: 77777.0} and not refusal(made, config)


def test_the_ropes_of_deepseek_v4_are_the_same_in_the_format_of_transformers_5():
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64}
    old, new = (copy.deepcopy(FAMILIES["deepseek_v4"].config) for _ in range(2))
    old |= {"rope_theta": 333.0, "compress_rope_theta": 77777.0, "rope_scaling": yarn}
    del new["rope_theta"], new["compress_rope_theta"], new["rope_scaling"]
    compress = {"rope_theta": 77777.0, "partial_rotary_factor": 0.5, "attention_factor": 1.0, **yarn}
    main = {"rope_type": "default", "rope_theta": 333.0, "partial_rotary_factor": 0.5}
    new["rope_parameters"] = {"main": main, "compress": compress}
    made = [module(library_config(EngineConfig(), config)) for config in (old, new)]
    assert not refusal(made[1], new)
    for one, other in zip(*(each.layers for each in made), strict=True):
        assert mx.array_equal(one.attn.rope._freqs, other.attn.rope._freqs)
    plain = module(FAMILIES["deepseek_v4"].config).layers[1].attn.rope._freqs
    assert not mx.allclose(made[0].layers[1].attn.rope._freqs, plain)


@pytest.mark.parametrize("name", KNOWN)
def test_windows_are_applied_or_known_to_be_ignored(name: str):
    def windowed(num_tokens: int) -> dict[str, Any]:
        config = copy.deepcopy(FAMILIES[name].config)
        section_of(config).update(sliding_window=num_tokens, use_sliding_window=True, max_window_layers=0)
        return config

    if name in STRICT:
        return
    narrow = windowed(8)
    is_applied = any(isinstance(one, RotatingKVCache | ChunkedKVCache) for one in make_prompt_cache(module(narrow)))
    assert ignored_window(narrow) is None or not is_applied
    declares_one = 8 in (declared_reaches(narrow) or ())
    if declares_one and not is_applied:
        assert ignored_window(narrow) == 8, "transformers applies the window"
        wide = module(windowed(4096))
        weights = drawn(wide)
        wide.load_weights(list(weights.items()), strict=False)
        assert np.array_equal(logits(wide), logits(module(narrow, weights))), "the library does not"


@pytest.mark.parametrize(
    ("family", "more", "window"),
    [
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 64),
        ("mistral", {}, 4096),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True}, None),
        ("gemma2", {}, 4096),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("llama", {"sliding_window": 64}, None),
    ],
)
def test_an_ignored_window_limits_the_context(family: str, more: dict[str, Any], window: int | None):
    for place in ("text_config", None):
        section = {"model_type": family, "num_hidden_layers": 3, "max_position_embeddings": 8192, **more}
        config = section if place is None else {"model_type": "llava", place: section}
        assert ignored_window(config) == window
        assert choose_context(EngineConfig(), config) == (window or 8192)
        assert choose_context(EngineConfig(max_context_tokens=32), config) == 32
        if window is not None:
            with pytest.raises(
                EngineFailed, match=rf"max_context_tokens is 5000; by config.json attention sees {window} tokens"
            ):
                choose_context(EngineConfig(max_context_tokens=5000), config)
