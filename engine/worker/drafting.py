"""How many draft tokens and waiting hidden states there are at most, and their bytes."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.core.runner import Drafts
from engine.worker.drafter import MAX_PENDING
from engine.worker.drafting_models import DraftingModels
from engine.worker.language_model import LanguageModel


def most_draft_tokens(drafts: Sequence[Drafts]) -> int:
    """Return the most draft tokens of any way to draft; 0 without one."""
    return max((one.num_tokens for one in drafts), default=0)


def most_pending(heads: DraftingModels | None, drafts: Sequence[Drafts]) -> int:
    """Return the most tokens of a row whose hidden states wait for heads: of a step, if they need only the newest."""
    return MAX_PENDING if heads is None or heads.reads_prompts else most_draft_tokens(drafts) + 1


def hidden_bytes(heads: DraftingModels | None, language_model: LanguageModel) -> int:
    """Return the bytes of a token's hidden states as all heads read them; 0 without a head. Computes nothing."""
    if heads is None:
        return 0
    token, cache = mx.zeros((1, 1), mx.int32), language_model.make_cache()
    hidden = language_model.extend(token, None, cache, np.zeros((3, 1, 1), np.int32), launch=False)
    read = heads.read(hidden, token)
    return 0 if read is None else read.nbytes
