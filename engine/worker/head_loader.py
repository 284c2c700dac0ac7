"""Loads the model's MTP heads: finds them, and checks that they fit the model and that their values are plausible.

`mtp_head` names each as a directory or hub repository with any of the following, with an EAGLE-3 head or with a DFlash
drafter. Without it, or where it says `own`, there is the head of the checkpoint's own tensors, or else what lies beside
the checkpoint: `<model>-mtp`, the output of `mlx_vlm.split_mtp` or `mlx_vlm.convert --mtp`, or `<model>-assistant`, as
the assistants of Gemma 4 are published. How heads are stored and computed is the matter of their forms in
engine/worker/heads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.config import OWN_HEAD, DraftLimits, EngineConfig, MTPConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import (
    heads_beside,
    read_config,
    read_optional_json,
    refuse_code,
    resolve_checkpoint,
)
from engine.worker.heads.deepseek_v4 import DEEPSEEK_V4
from engine.worker.heads.dflash import DFlashFormat
from engine.worker.heads.eagle3 import Eagle3Format
from engine.worker.heads.gemma4 import GEMMA4, GEMMA4_FORMATS
from engine.worker.heads.glm5_next import GLM5_NEXT
from engine.worker.heads.head import Head, HeadFormat
from engine.worker.heads.hy_v4 import HY_V4_FORMATS
from engine.worker.heads.nemotron import NEMOTRON_FORMATS
from engine.worker.heads.nextn import NEXTN_FORMATS
from engine.worker.heads.qwen import QWEN_FORMATS
from engine.worker.heads.qwen4 import QWEN4_FORMATS
from engine.worker.heads.refused_drafters import refused_drafter
from engine.worker.loaded_model import READY
from engine.worker.weights import weights_of

LIBRARY_FORMATS = {each.family: each for each in (DEEPSEEK_V4, GLM5_NEXT)}
FORMATS: dict[str, HeadFormat] = {
    **QWEN_FORMATS,
    **NEXTN_FORMATS,
    **QWEN4_FORMATS,
    **HY_V4_FORMATS,
    **LIBRARY_FORMATS,
    **NEMOTRON_FORMATS,
    **GEMMA4_FORMATS,
}
"""By the model_type of a checkpoint."""
OWN_FORMATS: dict[str, HeadFormat] = {"eagle3": Eagle3Format(), "dflash": DFlashFormat(), "assistant": GEMMA4}
"""Formats of heads that are recognized by their own config.json, by the name of their form; only `mtp_head` names those
that are in no FORMATS."""
OTHER_FORM = "mtp"
"""Name of all other forms."""


@dataclass(frozen=True)
class FoundHead:
    """A head as it was found."""

    path: Path | None  # Its directory; None if there is no head.
    status: str  # READY, or why there is no head.
    form: str = OTHER_FORM  # Name of its form: one of OWN_FORMATS, or OTHER_FORM.
    source: str = OWN_HEAD  # How the configuration names it.

    @property
    def text(self) -> str:
        """Form and source of a head, for status and log; empty without one."""
        return "" if self.path is None else f"{self.form}: {self.source}"


def find_heads(config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> list[FoundHead]:
    """Return the model's heads, in the order of `mtp_head`; one without a path if there is none.

    Raises:
        EngineFailed: The configuration asks for a head, and it was not found, or names one twice.
    """
    asked_for = "mtp_head" if config.mtp_heads else "mtp" if isinstance(config.mtp, MTPConfig) else None
    found: list[FoundHead] = []
    for name in config.mtp_heads or [OWN_HEAD]:
        path, status = _search(name, model_dir, model_config)
        if path is None and asked_for is not None:
            named = f", which names {name!r}" if len(config.mtp_heads) > 1 else ""
            raise EngineFailed(f"{asked_for} is configured{named}, but there is no usable MTP head: {status}")
        same = next((one for one in found if one.path and path and one.path.samefile(path)), None)
        if same is not None:
            raise EngineFailed(f"mtp_head names the head in {path} twice, as {same.source!r} and {name!r}")
        form = None if path is None else _own_form(path)
        found.append(FoundHead(path, status, form or OTHER_FORM, name))
    return found


def load_head(head_dir: Path, model_config: dict[str, Any], language_model: Any) -> Head:
    """Load the head in `head_dir`, not bound to the model, in eval mode; weights as stored and possibly lazy.

    Code in the directory is never run. A config.json that names some is rejected, unless it is that which
    the head's form is published with, and which is computed here.

    Args:
        head_dir: See `find_heads`.
        model_config: The target's config.json.
        language_model: The library's language model of the target.

    Raises:
        EngineFailed: The head does not fit the model, or tensors are missing, unexpected or of another shape.
    """
    try:
        head_format = _format_of(head_dir, model_config)
        refuse_code(head_dir, head_format.known_code)
        return head_format.load(head_dir, language_model)
    except EngineFailed:
        raise
    except Exception as error:  # a damaged checkpoint can raise anything
        reason = " ".join((str(error) if isinstance(error, ValueError) else repr(error)).split())
        raise EngineFailed(f"the MTP head in {head_dir} could not be loaded: {reason}") from error


def check_limits(head: Head, limits: str | DraftLimits) -> None:
    """Check that a head can draft as many tokens as the configuration fixes, if it does.

    Raises:
        EngineFailed: Its blocks are shorter.
    """
    if isinstance(limits, DraftLimits) and head.block is not None and limits.max_draft_tokens >= head.block.block_size:
        raise EngineFailed(
            f"mtp.max_draft_tokens is {limits.max_draft_tokens}, but the longest block of the head in "
            f"{head.model_path} has {head.block.block_size} tokens, the first of which is no draft; use at most "
            f"{head.block.block_size - 1}"
        )


def check_values(head: Any, model_config: dict[str, Any]) -> None:
    """Check a loaded head.

    Raises:
        EngineFailed: Values are not finite, or not plausible for heads of this form.
    """
    for name, w in weights_of(head):
        if mx.issubdtype(w.dtype, mx.floating) and (num_bad := w.size - _count(mx.isfinite(w))):
            raise EngineFailed(
                f"the MTP head in {head.model_path}: {num_bad} of {w.size} values in {name} are not finite"
            )
    _format_of(head.model_path, model_config).check_values(head)


def _format_of(head_dir: Path, model_config: dict[str, Any]) -> HeadFormat:
    form = _own_form(head_dir)
    return FORMATS[str(model_config["model_type"])] if form is None else OWN_FORMATS[form]


def _own_form(head_dir: Path) -> str | None:
    return next((form for form, one in OWN_FORMATS.items() if one.is_in(head_dir)), None)


def family_unsupported_reason(model_type: str) -> str | None:
    """Return why checkpoints of a family can have no MTP head, None if they can."""
    return None if model_type in FORMATS else f"MTP heads of model_type {model_type} are not supported"


def _search(mtp_head: str, model_dir: Path, model_config: dict[str, Any]) -> tuple[Path | None, str]:
    family = str(model_config.get("model_type"))
    head_dir = None if mtp_head == OWN_HEAD else _resolve(mtp_head)
    if head_dir is not None and _own_form(head_dir) is not None:
        return head_dir, READY
    if head_dir is not None and (reason := refused_drafter(read_config(head_dir))) is not None:
        raise EngineFailed(f"mtp_head: the drafter in {head_dir} is not supported: {reason}")
    if (reason := family_unsupported_reason(family)) is not None:
        return None, reason
    if head_dir is not None:
        return head_dir, READY
    head_format = FORMATS[family]
    if head_format.is_in(model_dir):
        return model_dir, READY
    missing = f"no {head_format.tensors} tensors in {model_dir}"
    if (sibling := next(iter(heads_beside(model_dir)), None)) is None:
        return None, missing
    found = read_optional_json(sibling / "config.json").get("model_type")
    if found not in head_format.split_types:
        expected = " or ".join(repr(one) for one in head_format.split_types)
        return None, f"{missing}; {sibling} has model_type {found!r}, expected {expected}"
    return sibling, READY


def _resolve(mtp_head: str) -> Path:
    try:
        return resolve_checkpoint(mtp_head, None, weights=True)
    except EngineFailed as error:
        raise EngineFailed(f"mtp_head: {error}") from error


def _count(condition: mx.array) -> int:
    count: Any = condition.sum().item()
    return count
