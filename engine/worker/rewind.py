"""Tells whether a family's rows can go back to before rejected drafts."""

import mlx.core as mx
import numpy as np

from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import is_recurrent
from engine.worker.recurrent_layer import NotRewindable


def has_recurrent_layers(language_model: LanguageModel) -> bool:
    """Return whether any layer has a recurrent state."""
    return any(map(is_recurrent, language_model.make_cache()))


def rewind_unsupported_reason(language_model: LanguageModel) -> str | None:
    """Return why rejected drafts cannot be taken back, None if they can.

    A recurrent family must update its states through the cache's methods, which record what a return needs. Whether it
    does is seen by building, but not computing, a forward of two tokens.
    """
    if not has_recurrent_layers(language_model):
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
