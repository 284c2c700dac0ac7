"""Loads the model's MTP head: finds it, and checks that it fits the model and that its values are plausible.

Searched in this order: `mtp_head` (a directory or hub repository with either of the following), the checkpoint's own
`mtp.*` tensors, and the output of `mlx_vlm.split_mtp` or `mlx_vlm.convert --mtp` beside it, `<model>-mtp`.
"""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter
from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig, Qwen3_5MTPDraftModel
from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter, Qwen3NextMTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.config import EngineConfig, MTPConfig
from engine.processing.checkpoint import read_config, read_optional_json, refuse_code, resolve_checkpoint
from engine.processing.reference_config import arithmetic_reference, text_section
from engine.protocol import EngineFailed
from engine.worker.config_fields import check_arithmetic

READY = "ready"
OFF = "off in the configuration"
REPLACED = "the configured draft_model drafts instead"
SPLITTERS: dict[str, type[MTPSplitter]] = {
    "qwen3_5": Qwen3_5MTPSplitter,
    "qwen3_5_text": Qwen3_5MTPSplitter,
    "qwen3_5_moe": Qwen3_5MTPSplitter,
    "qwen3_5_moe_text": Qwen3_5MTPSplitter,
    "qwen3_next": Qwen3NextMTPSplitter,
}
"""model_type -> how the library reads the head from a checkpoint of the family."""
SPLIT_TYPE = Qwen3_5MTPSplitter.output_model_type

MAX_SHARE_NOT_POSITIVE = 0.25
"""Limit per norm. Trained gains are positive in each of the demo's 28 norms. If unshifted (raw files hold gain - 1),
at least pre_fc_norm_embedding is negative: 88 % of the demo's, all of published ones (MTPLX#511)."""
MAX_SHARE_ABOVE_ONE = 0.99
"""Limit over all gains of a head: 53 % in the demo's, 100 % when shifted twice. Means are no criterion: published heads
range from 0.27 (pre_fc_norm_embedding, omlx#3750) to 2.25 (norm, MTPLX#301), the demo's from 0.50 to 1.54."""


def find_head(config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> tuple[Path | None, str]:
    """Return the directory of the model's head and READY, or None and why there is no head.

    Raises:
        EngineFailed: The configuration asks for a head, and none was found.
    """
    if config.mtp == "off":
        return None, OFF
    if config.draft_model is not None:
        if config.mtp_head is not None or isinstance(config.mtp, MTPConfig):
            raise EngineFailed("draft_model is configured beside mtp_head or limits of mtp; only one of them can draft")
        return None, REPLACED
    head_dir, status = _search(config.mtp_head, model_dir, model_config)
    asked_for = "mtp_head" if config.mtp_head is not None else "mtp" if isinstance(config.mtp, MTPConfig) else None
    if head_dir is None and asked_for is not None:
        raise EngineFailed(f"{asked_for} is configured, but there is no usable MTP head: {status}")
    return head_dir, status


def load_head(head_dir: Path, language_model: Any) -> Qwen3_5MTPDraftModel:
    """Load the head in `head_dir`, not bound to the model, in eval mode; weights as stored and possibly lazy.

    Code in the directory is rejected, never run.

    Raises:
        EngineFailed: The head does not fit the model, or tensors are missing, unexpected or of another shape.
    """
    refuse_code(head_dir)
    try:
        return _load(head_dir, language_model)
    except EngineFailed:
        raise
    except Exception as error:  # a damaged checkpoint can raise anything
        reason = " ".join((str(error) if isinstance(error, ValueError) else repr(error)).split())
        raise EngineFailed(f"the MTP head in {head_dir} could not be loaded: {reason}") from error


def is_quantized(head: Qwen3_5MTPDraftModel) -> bool:
    """Return whether the head has quantized weights."""
    return any(name.endswith(".scales") for name, _ in _weights(head))


def check_values(head: Any) -> None:
    """Check a loaded head: one with wrong norms loads and drafts, but almost nothing is accepted.

    Raises:
        EngineFailed: Values are not finite, or norms were not shifted by one, or twice.
    """
    head_dir: Path = head.model_path
    weights = [(name, w) for name, w in _weights(head) if mx.issubdtype(w.dtype, mx.floating)]
    for name, w in weights:
        if num_bad := w.size - _count(mx.isfinite(w)):
            raise EngineFailed(f"the MTP head in {head_dir}: {num_bad} of {w.size} values in {name} are not finite")
    _check_norms({name: w for name, w in weights if name.endswith("norm.weight")}, head_dir)


def family_unsupported_reason(model_type: str) -> str | None:
    """Return why checkpoints of a family can have no MTP head, None if they can."""
    return None if model_type in SPLITTERS else f"MTP heads of model_type {model_type} are not supported"


def _search(mtp_head: str | None, model_dir: Path, model_config: dict[str, Any]) -> tuple[Path | None, str]:
    family = str(model_config.get("model_type"))
    if (reason := family_unsupported_reason(family)) is not None:
        return None, reason
    if mtp_head is not None:
        return _resolve(mtp_head), READY
    if _has_head(model_dir, SPLITTERS[family]()):
        return model_dir, READY
    sibling = model_dir.parent / f"{model_dir.name}-mtp"
    missing = f"no mtp.* tensors in {model_dir}"
    if not sibling.is_dir():
        return None, missing
    found = read_optional_json(sibling / "config.json").get("model_type")
    if found != SPLIT_TYPE:
        return None, f"{missing}; {sibling} has model_type {found!r}, expected {SPLIT_TYPE!r}"
    return sibling, READY


def _has_head(model_dir: Path, splitter: MTPSplitter) -> bool:
    """Return whether a checkpoint has tensors of a head; its configuration does not tell."""
    text_config = splitter.read_text_config(read_config(model_dir))
    return any(True for _ in splitter.iter_selected(model_dir, text_config))


def _resolve(mtp_head: str) -> Path:
    try:
        return resolve_checkpoint(mtp_head, None, weights=True)
    except EngineFailed as error:
        raise EngineFailed(f"mtp_head: {error}") from error


def _load(head_dir: Path, language_model: Any) -> Qwen3_5MTPDraftModel:
    config, weights = _read(head_dir)
    head_config = ModelConfig.from_dict(copy.deepcopy(config))  # from_dict edits its argument
    _check_fit(_identity(head_config.text_config), _identity(language_model.args), head_dir)
    section = text_section(config)
    try:
        check_arithmetic(str(section.get("model_type")), section, head_config.text_config, arithmetic_reference(config))
    except EngineFailed as error:
        raise EngineFailed(f"the MTP head in {head_dir} cannot be used: {error}") from None
    # Not mlx_vlm's load_model: it drops modules without tensors instead of refusing (0.7.10, utils.py).
    head: Any = load_model_weights(Qwen3_5MTPDraftModel(head_config), config, weights, head_dir, lazy=True)
    return head


def _read(head_dir: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Read configuration and tensors of the head, with norms as gains; a split head has them in this form."""
    config = read_config(head_dir)
    family = config.get("model_type")
    if family == SPLIT_TYPE:
        weights: dict[str, mx.array] = {}
        for file in sorted(head_dir.glob("*.safetensors")):
            weights |= mx.load(str(file))  # type: ignore[arg-type]
        return config, weights
    if family not in SPLITTERS:
        expected = ", ".join((SPLIT_TYPE, *SPLITTERS))
        raise EngineFailed(f"the MTP head in {head_dir}: model_type is {family!r}, expected one of {expected}")
    return SPLITTERS[family]().prepare(head_dir)


def _identity(text_config: Any) -> dict[str, Any]:
    """Return what a head and its model must have in common to share hidden states, embeddings and positions.

    Qwen3-Next has its rope settings beside each other, and no sections, as it takes one position per token.
    """
    nested = getattr(text_config, "rope_parameters", None)
    rope = vars(text_config) if nested is None else nested
    keys = ("rope_theta", "partial_rotary_factor", "mrope_section")
    return {
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        **{key: rope[key] for key in keys if key in rope},
    }


def _check_fit(head: dict[str, Any], target: dict[str, Any], head_dir: Path) -> None:
    wrong = [f"{key} is {head.get(key)}, expected {target[key]}" for key in target if head.get(key) != target[key]]
    if wrong:
        raise EngineFailed(f"the MTP head in {head_dir} does not fit the model: {'; '.join(wrong)}")


def _check_norms(gains: dict[str, mx.array], head_dir: Path) -> None:
    for name, g in gains.items():
        share = _count(g <= 0) / g.size
        if share > MAX_SHARE_NOT_POSITIVE:
            raise EngineFailed(
                f"the MTP head in {head_dir}: {share:.0%} of {name} are not positive, expected at most "
                f"{MAX_SHARE_NOT_POSITIVE:.0%}: its norms contain gain - 1, but its files or names indicate the gain"
            )
    share = sum(_count(g > 1) for g in gains.values()) / sum(g.size for g in gains.values())
    if share > MAX_SHARE_ABOVE_ONE:
        raise EngineFailed(
            f"the MTP head in {head_dir}: {share:.0%} of the gains in its norms are above 1, expected at most "
            f"{MAX_SHARE_ABOVE_ONE:.0%}: its norms contain the gain, but its files or names indicate gain - 1"
        )


def _count(condition: mx.array) -> int:
    count: Any = condition.sum().item()
    return count


def _weights(head: Qwen3_5MTPDraftModel) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(head.parameters())
    return flat
