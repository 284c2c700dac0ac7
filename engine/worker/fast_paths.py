"""Tells which fast paths a model has, and why it lacks one. Computes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.worker import proposers
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import is_recurrent
from engine.worker.rewind import rewind_unsupported_reason
from engine.worker.snapshot import prefix_unsupported_reason

NO_POSITIONS = "this model does not accept explicit positions"
MORE_STATES = "its recurrent layers have more than a window and a state, which a compiled step does not return"
NO_SELECTION = "its layers cannot be run without its output layer"


@dataclass(frozen=True)
class FastPaths:
    """Why a model lacks each fast path; None where it has it."""

    bursts: str | None
    """Several prompts in one forward."""
    compiled_step: str | None
    """The decode step as a compiled graph."""
    drafts: Mapping[str, str | None]
    """Drafts by proposer; for one that needs weights, if there are any."""
    sparse_prefill: str | None
    """Execution of a plan that leaves prompt tokens out."""
    prefix_snapshots: str | None
    """Snapshots at boundaries within a chunk, which then need not end there; never while drafts are made by a model."""

    @classmethod
    def of(cls, language_model: LanguageModel, model_type: str) -> "FastPaths":
        """Tell them from the model's structure; its weights need not be read."""
        positions = None if language_model.explicit_positions else NO_POSITIONS
        cache = language_model.make_cache()
        more_states = any(is_recurrent(layer) and len(layer.cache) > 2 for layer in cache)
        rewind = rewind_unsupported_reason(language_model)
        return cls(
            bursts=None if language_model.selects_positions else NO_SELECTION,
            compiled_step=positions or (MORE_STATES if more_states else None),
            drafts={one.name: one.unsupported_reason(model_type, rewind) for one in proposers.PROPOSERS},
            sparse_prefill=positions,
            prefix_snapshots=prefix_unsupported_reason(cache),
        )
