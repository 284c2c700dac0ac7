"""Proposer: a kind of proposer of draft tokens, and what the engine asks it, from the start to the drafts of a row.

A new kind is a subclass in a file of its own, with an entry in `proposers.PROPOSERS`. Its mode is `auto` unless
`EngineConfig.draft_modes` has an option for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.config import DraftLimits, EngineConfig
from engine.worker.drafter import DraftingModel
from engine.worker.language_model import LanguageModel
from engine.worker.layer_outputs import ModuleOutputs
from engine.worker.loaded_model import READY, FoundProposer, OpenedModel
from engine.worker.recurrent_layer import BatchRecurrentLayer
from engine.worker.rewind import has_recurrent_layers, rewind_unsupported_reason


@dataclass(frozen=True)
class Target:
    """The model that is drafted for."""

    language_model: LanguageModel
    vocab_size: int
    """Number of logits."""
    num_embeddings: int
    """Token ids of its prompts are below it."""

    @property
    def keeps_states(self) -> bool:
        """Whether its recurrent layers keep a state per verified token, so that more drafts take more memory."""
        return has_recurrent_layers(self.language_model) and not BatchRecurrentLayer.is_factored


class RowDrafts(Protocol):
    """Drafts of one row by a TextProposer, from the tokens of its prompt and answer."""

    @property
    def has_drafts(self) -> bool:
        """Whether there are drafts for the next tokens."""
        ...

    def append(self, token_ids: tuple[int, ...]) -> None:
        """Append new tokens of the answer."""
        ...

    def drafts(self, num_tokens: int) -> list[int]:
        """Return the next `num_tokens` drafts, which may be token ids without a logit; any where it has none."""
        ...


class Proposer:
    """A kind of proposer; see TextProposer and ModelProposer."""

    name: str
    """Names its drafts in outputs, in the status and in metrics, and its option."""
    is_selective: bool
    """See Drafts."""
    off_reason = "off in the configuration"
    """Why it does not draft where its mode is off."""
    needs_rewind = True
    """Whether it drafts for each target that can go back to before rejected drafts, and for no other."""

    def asked_for(self, config: EngineConfig) -> tuple[str, ...]:
        """Return the options that ask for its drafts whatever they bring; those with `auto` do not."""
        return (f"{self.name} with limits",) if isinstance(config.draft_modes.get(self.name), DraftLimits) else ()

    def unsupported_reason(self, family: str, no_rewind: str | None) -> str | None:
        """Return why it cannot draft for targets of a family, None if it can.

        Args:
            family: model_type of the target.
            no_rewind: See rewind_unsupported_reason.
        """
        return no_rewind

    def offer(
        self, config: EngineConfig, target: Target, model: DraftingModel | None, found: FoundProposer | None
    ) -> Sequence[int] | str:
        """Return the numbers of draft tokens per row that `auto` chooses from, or why it cannot draft.

        Args:
            config: The configuration.
            target: The model that is drafted for.
            model: The model that drafts for a ModelProposer, any model that drafts for a TextProposer; None without
                one.
            found: The proposer's own weights; None for a TextProposer.
        """
        raise NotImplementedError


class TextProposer(Proposer):
    """Drafts on the host from a row's own tokens: a step with its drafts waits for the tokens of the step before it."""

    is_selective = True

    def lengths(self, target: Target, model: DraftingModel | None) -> Sequence[int]:
        """Return the numbers of draft tokens per row that `auto` chooses from; see `offer`."""
        raise NotImplementedError

    def row_drafts(self, token_ids: np.ndarray) -> RowDrafts:
        """Return the drafts of a row with these tokens, int32."""
        raise NotImplementedError

    def offer(
        self, config: EngineConfig, target: Target, model: DraftingModel | None, found: FoundProposer | None
    ) -> Sequence[int] | str:
        if config.draft_modes.get(self.name) == "off":
            return self.off_reason
        return rewind_unsupported_reason(target.language_model) or self.lengths(target, model)


class ModelProposer(Proposer):
    """Drafts with a model, or with several beside each other; those of one kind at most are loaded."""

    is_selective = False
    label: str
    """Name in the log."""
    reads_target = False
    """Whether it reads hidden states of the target."""
    replaces_others = False
    """Whether no other model drafts where the configuration asks for this one."""

    def find(self, config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> FoundProposer:
        """Return where its weights are, or why it does not draft, without reading a weight; its mode is not off.

        Args:
            config: The configuration.
            model_dir: The target's checkpoint.
            model_config: The target's config.json.

        Raises:
            EngineFailed: The configuration asks for it, and it cannot draft.
        """
        return FoundProposer(READY)

    def find_all(self, config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> dict[str, FoundProposer]:
        """Return what `find` does by the names of proposers, of which the kind's own name is the first; see there."""
        return {self.name: self.find(config, model_dir, model_config)}

    def load(
        self,
        config: EngineConfig,
        found: FoundProposer,
        target: OpenedModel,
        opening: Callable[[EngineConfig], OpenedModel],
    ) -> FoundProposer:
        """Return it with its module in eval mode, whose weights are lazy, and with its path.

        Args:
            config: The configuration.
            found: As `find` returned it, with the status READY.
            target: The model that is drafted for.
            opening: Opens another model.

        Raises:
            EngineFailed: It cannot be loaded, or does not fit the target.
        """
        raise NotImplementedError

    def check(self, module: Any, model_config: dict[str, Any]) -> None:
        """Check the values of the loaded weights. Raises EngineFailed."""

    def layer_outputs(self, module: Any) -> ModuleOutputs | None:
        """Return the target's modules whose outputs it reads; None if it reads none, or the last hidden states."""
        return None

    def drafting_model(self, module: Any, target: Target) -> DraftingModel:
        """Return the model that drafts, for a loaded module."""
        raise NotImplementedError

    def lengths(self, model: DraftingModel, target: Target) -> Sequence[int]:
        """Return the numbers of draft tokens per row that `auto` chooses from; see `offer`."""
        raise NotImplementedError

    def offer(
        self, config: EngineConfig, target: Target, model: DraftingModel | None, found: FoundProposer | None
    ) -> Sequence[int] | str:
        if model is None:
            return "it has no weights" if found is None else found.status
        return self.lengths(model, target)
