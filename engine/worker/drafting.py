"""The proposers of a loaded model: the model that drafts, and which ways to draft there are."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.config import DraftLimits, EngineConfig
from engine.core.runner import Drafts, Proposer
from engine.worker.draft_model import DraftModel
from engine.worker.drafter import MAX_PENDING, DraftingModel
from engine.worker.drafting_head import DraftingHead
from engine.worker.language_model import LanguageModel
from engine.worker.recurrent_layer import BatchRecurrentLayer
from engine.worker.rewind import has_recurrent_layers, rewind_unsupported_reason

MTP_LENGTHS = (1, 2, 3)
"""Draft tokens per row that `auto` chooses from. Heads are trained for one to two tokens ahead; a fourth is rarely
right."""
SHARING_LENGTHS = (1, 3, 5, 7)
"""The same for a head that shares the target's keys and values: it is trained to draft several tokens from one place.
For Gemma 4 two to four are recommended with its small models, four to eight with the others."""
BLOCK_LENGTHS = (1, 3, 7, 15)
"""The same for a head that drafts a block in one forward, as far as they are below the longest block."""
MOST_STATES = 3
"""The most of these for recurrent models that keep a state per verified token."""
DRAFT_MODEL_LENGTHS = (1, 2, 3)
LOOKUP_LENGTHS = (2, 4)
SHORT_LOOKUP_LENGTHS = (2, 3)
"""The same for prompt lookup; the shorter ones for models with a head, so that rows reserve no more memory than for its
drafts, and for recurrent models that keep a state per verified token."""


def drafting_head(
    draft: Any | None, mtp_head: Any | None, vocab_size: int, num_embeddings: int, language_model: LanguageModel
) -> DraftingModel | None:
    """Return the model that drafts, None without one.

    Args:
        draft: The library's model of a draft model, which precedes the MTP head.
        mtp_head: The MTP head, the EAGLE-3 head, the DFlash drafter or the Gemma 4 assistant.
        vocab_size: Number of logits of the target.
        num_embeddings: Number of token ids of its prompts.
        language_model: The target.
    """
    if draft is not None:
        return DraftModel(draft, vocab_size, num_embeddings)
    return None if mtp_head is None else DraftingHead(mtp_head, language_model)


def drafts_offered(
    config: EngineConfig, head: DraftingModel | None, no_head: str, language_model: LanguageModel
) -> tuple[tuple[Drafts, ...], dict[Proposer, str]]:
    """Return the ways to draft, see ModelRunner.drafts, and why proposers cannot draft.

    Args:
        config: The configuration.
        head: The MTP head or the draft model, None without either.
        no_head: Why there is no MTP head, if there is none.
        language_model: The language model, whose weights need not be evaluated.
    """
    keeps_states = has_recurrent_layers(language_model) and not BatchRecurrentLayer.is_factored
    drafts: list[Drafts] = []
    reasons: dict[Proposer, str] = {}
    if config.draft_model is not None and head is not None and head.proposer == "draft_model":
        drafts += [Drafts(k, "draft_model") for k in _lengths(config.draft_model.limits, DRAFT_MODEL_LENGTHS)]
    else:
        reasons["draft_model"] = "no draft_model is configured"
    if head is None or head.proposer != "mtp":
        reasons["mtp"] = no_head
    else:
        drafts += [Drafts(k, "mtp") for k in _lengths(config.mtp, _lengths_of(head, keeps_states))]
    if config.prompt_lookup == "off":
        reasons["prompt_lookup"] = "off in the configuration"
    elif (reason := rewind_unsupported_reason(language_model)) is not None:
        reasons["prompt_lookup"] = reason
    else:
        lengths = SHORT_LOOKUP_LENGTHS if keeps_states or head is not None else LOOKUP_LENGTHS
        drafts += [Drafts(k, "prompt_lookup") for k in _lengths(config.prompt_lookup, lengths)]
    return tuple(drafts), reasons


def most_draft_tokens(drafts: Sequence[Drafts]) -> int:
    """Return the most draft tokens of any way to draft; 0 without one."""
    return max((one.num_tokens for one in drafts), default=0)


def most_pending(head: DraftingModel | None, drafts: Sequence[Drafts]) -> int:
    """Return the most tokens of a row whose hidden states wait for the head: of a step, if it needs only the newest."""
    return MAX_PENDING if head is None or head.sharing is None else most_draft_tokens(drafts) + 1


def hidden_bytes(head: DraftingModel | None, language_model: LanguageModel) -> int:
    """Return the bytes of a token's hidden state as the head reads it; 0 without a head. Computes nothing."""
    if head is None:
        return 0
    token, cache = mx.zeros((1, 1), mx.int32), language_model.make_cache()
    hidden = language_model.extend(token, None, cache, np.zeros((3, 1, 1), np.int32), launch=False)
    read = head.read(hidden, token)
    return 0 if read is None else read.nbytes


def _lengths_of(head: DraftingModel, keeps_states: bool) -> Sequence[int]:
    """Return the numbers of draft tokens of a head with `auto`."""
    if head.sharing is not None:
        return SHARING_LENGTHS
    if head.block is None:
        return MTP_LENGTHS
    most = min(head.block.size - 1, MOST_STATES if keeps_states else BLOCK_LENGTHS[-1])
    return [*(k for k in BLOCK_LENGTHS if k < most), most]


def _lengths(mode: str | DraftLimits, auto: Sequence[int]) -> Sequence[int]:
    """Return the numbers of draft tokens; with fixed limits those up to the limit, of which the last is used."""
    if not isinstance(mode, DraftLimits):
        return auto
    return [*(k for k in auto if k < mode.max_draft_tokens), mode.max_draft_tokens]
