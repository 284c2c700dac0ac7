"""How many draft tokens and waiting hidden states there are at most, and their bytes."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.core.runner import Drafts
from engine.worker.drafter import MAX_PENDING, DraftingModel
from engine.worker.language_model import LanguageModel


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
