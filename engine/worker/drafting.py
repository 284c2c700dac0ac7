"""Tells which ways to draft a loaded model offers: by which proposers, and how many tokens."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache

from engine.config import DraftLimits, EngineConfig
from engine.core.batch import Drafts, Proposer
from engine.worker.draft_model import DraftModel
from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from engine.worker.mtp import DraftHead
from engine.worker.recurrent_layer import BatchRecurrentLayer, NotRewindable

MTP_LENGTHS = (1, 2, 3)
"""Draft tokens per row that `auto` chooses from. Heads are trained for one to two tokens ahead; a fourth is rarely
right."""
DRAFT_MODEL_LENGTHS = (1, 2, 3)
LOOKUP_LENGTHS = (2, 4)
SHORT_LOOKUP_LENGTHS = (2, 3)
"""The same for prompt lookup; the shorter ones for models with a head, so that rows reserve no more memory than for its
drafts, and for recurrent models that keep a state per verified token."""


def drafts_offered(
    config: EngineConfig, head: DraftHead | None, no_head: str, language_model: LanguageModel
) -> tuple[tuple[Drafts, ...], dict[Proposer, str]]:
    """Return the ways to draft, see ModelRunner.drafts, and why proposers cannot draft.

    Args:
        config: The configuration.
        head: The MTP head or the draft model, None without either.
        no_head: Why there is no MTP head, if there is none.
        language_model: The language model, whose weights need not be evaluated.
    """
    drafts: list[Drafts] = []
    reasons: dict[Proposer, str] = {}
    if config.draft_model is not None and isinstance(head, DraftModel):
        drafts += [Drafts(k, "draft_model") for k in _lengths(config.draft_model.limits, DRAFT_MODEL_LENGTHS)]
    else:
        reasons["draft_model"] = "no draft_model is configured"
    if head is None or isinstance(head, DraftModel):
        reasons["mtp"] = no_head
    else:
        drafts += [Drafts(k, "mtp") for k in _lengths(config.mtp, MTP_LENGTHS)]
    if config.prompt_lookup == "off":
        reasons["prompt_lookup"] = "off in the configuration"
    elif (reason := rewind_unsupported_reason(language_model)) is not None:
        reasons["prompt_lookup"] = reason
    else:
        keeps_states = is_recurrent(language_model) and not BatchRecurrentLayer.is_factored
        lengths = SHORT_LOOKUP_LENGTHS if keeps_states or head is not None else LOOKUP_LENGTHS
        drafts += [Drafts(k, "prompt_lookup") for k in _lengths(config.prompt_lookup, lengths)]
    return tuple(drafts), reasons


def most_draft_tokens(drafts: Sequence[Drafts]) -> int:
    """Return the most draft tokens of any way to draft; 0 without one."""
    return max((one.num_tokens for one in drafts), default=0)


def is_recurrent(language_model: LanguageModel) -> bool:
    """Return whether any layer has a recurrent state."""
    return any(isinstance(layer, ArraysCache) for layer in language_model.make_cache())


def rewind_unsupported_reason(language_model: LanguageModel) -> str | None:
    """Return why rejected drafts cannot be taken back, None if they can.

    A recurrent family must update its states through the cache's methods, which record what a return needs. Whether it
    does is seen by building, but not computing, a forward of two tokens.
    """
    if not is_recurrent(language_model):
        return None
    row = language_model.make_cache()
    one, two = np.zeros((3, 1, 1), np.int32), mx.array([[1, 2]], mx.int32)
    language_model.extend(mx.zeros((1, 1), mx.int32), None, row, one, launch=False)
    cache = BatchCache.of(row, as_offset=not language_model.explicit_positions)
    try:
        language_model.decode(mx.zeros((1, 2), mx.int32), cache.at(mx.array([1], mx.int32), 3, record=True), two)
    except NotRewindable:
        return "this family overwrites its recurrent states, so rejected drafts cannot be taken back"
    return None


def _lengths(mode: str | DraftLimits, auto: Sequence[int]) -> Sequence[int]:
    """Return the numbers of draft tokens; with fixed limits those up to the limit, of which the last is used."""
    if not isinstance(mode, DraftLimits):
        return auto
    return [*(k for k in auto if k < mode.max_draft_tokens), mode.max_draft_tokens]
