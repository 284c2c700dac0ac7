"""Reads config.json of DFlash drafters, and refuses by name what would be other arithmetic than the library's."""

from pathlib import Path
from typing import Any

from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig

from engine.errors import EngineFailed
from engine.worker.config_fields import check_arithmetic

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPES = ("qwen3", "qwen3_dflash")
"""model_type of the drafters, whatever their target's is."""
OWN_SECTION = "dflash_config"
OWN_FIELDS = (
    *("mask_token_id", "target_layer_ids", "num_target_layers", "runtime_block_size"),
    *("causal", "attention_sink_bias"),
)
"""Fields of OWN_SECTION that are applied."""
REQUIRED = ("mask_token_id", "target_layer_ids", "block_size", "rope_theta")
"""Fields for which the library has defaults, those of one published drafter."""
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "draft_window_size": (None, 0),
    "final_logit_softcapping": (None,),
    "markov_rank": (None, 0),
    "partial_rotary_factor": (None, 1),
    "projector_type": (None, "dflash"),
    "pure_draft_prefix_len": (None, 0),
    "rope_is_neox_style": (None, True),
    "shift_label": (None, False),
}
"""Values of fields that are not applied, for which the arithmetic is that of the module."""
AUTO_MAP = {"AutoModel": f"dflash.{ARCHITECTURE}"}
"""The code that published drafters name, which transformers would run: the module that is computed here."""
ROPES = (None, "default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"


def is_dflash(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of a DFlash drafter of any kind, also one that is refused."""
    named = config.get("architectures")
    names = [*(named if isinstance(named, list) else ()), config.get("speculators_model_type")]
    return OWN_SECTION in config or any("dflash" in str(name).lower() for name in names)


def dflash_config(config: dict[str, Any], head_dir: Path) -> DFlashConfig:
    """Return the library's configuration of a drafter.

    Args:
        config: Its config.json.
        head_dir: Where it is, for messages.

    Raises:
        EngineFailed: A field is missing, or asks for something that is not computed; names it and its value.
    """
    try:
        if (reason := _of_another_kind(config) or _of_fields(config) or _of_rope(config)) is not None:
            raise EngineFailed(reason)
        found = DFlashConfig.from_dict(config)
        if (reason := _of_sizes(found) or _of_layers(found)) is not None:
            raise EngineFailed(reason)
        check_arithmetic(MODEL_TYPES[-1], config, found, None)
    except EngineFailed as error:
        raise EngineFailed(f"the DFlash drafter in {head_dir} is not supported: {error}") from None
    return found


def block_size(config: DFlashConfig) -> int:
    """Return the tokens of the longest block, the newest one included."""
    return min(config.block_size, config.runtime_block_size or config.block_size)


def _of_another_kind(config: dict[str, Any]) -> str | None:
    named, family = config.get("architectures"), config.get("model_type")
    if named != [ARCHITECTURE]:
        return f"architectures is {named!r}, expected {[ARCHITECTURE]!r}"
    return None if family in MODEL_TYPES else f"model_type is {family!r}, expected {' or '.join(MODEL_TYPES)}"


def _of_fields(config: dict[str, Any]) -> str | None:
    own, rope = config.get(OWN_SECTION) or {}, config.get("rope_parameters") or {}
    for name in own:
        if name not in (*OWN_FIELDS, *ONLY):
            return f"{OWN_SECTION} has {name} {own[name]!r}, which is not known"
    flat = config | {name: value for name, value in rope.items() if name in (*REQUIRED, *ONLY)} | own
    for name in REQUIRED:
        if flat.get(name) is None:
            return f"config.json has no {name}"
    for name, values in ONLY.items():
        if flat.get(name) not in values:
            return f"{name} is {flat[name]!r}, expected {values[-1]!r}"
    return None


def _of_rope(config: dict[str, Any]) -> str | None:
    scaling, rope = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if scaling and rope and scaling != rope:
        return f"rope_scaling is {scaling!r} beside rope_parameters {rope!r}, expected one of them"
    rope = rope or scaling
    kind = rope.get("type") or rope.get("rope_type")
    return None if kind in ROPES else f"rope_type is {kind!r}, expected one of {', '.join(map(str, ROPES[1:]))}"


def _of_sizes(config: DFlashConfig) -> str | None:
    sizes = {"block_size": config.block_size}
    if config.runtime_block_size is not None:
        sizes["runtime_block_size"] = config.runtime_block_size
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < 2]
    if wrong:
        return f"{wrong[0]} is {sizes[wrong[0]]!r}, expected an integer of at least 2"
    mask = config.mask_token_id
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        return f"mask_token_id is {mask!r}, expected a token id below vocab_size, {config.vocab_size}"
    return None


def _of_layers(config: DFlashConfig) -> str | None:
    kinds = config.layer_types or [FULL] * config.num_hidden_layers
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown or len(kinds) != config.num_hidden_layers:
        return f"layer_types is {kinds!r}, expected {FULL} or {SLIDING} for each of {config.num_hidden_layers} layers"
    window = config.sliding_window
    if SLIDING in kinds and (type(window) is not int or window < 2):
        return f"sliding_window is {window!r} beside {SLIDING} layers, expected an integer of at least 2"
    return None
