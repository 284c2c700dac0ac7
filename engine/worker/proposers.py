"""The proposers of draft tokens: the registry of their kinds, and those of a loaded model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import DraftLimits, EngineConfig
from engine.core.runner import Drafts
from engine.errors import EngineFailed
from engine.worker.draft_model import SeparateModel
from engine.worker.drafter import DraftingModel
from engine.worker.drafting_models import DraftingModels
from engine.worker.language_model import LanguageModel
from engine.worker.layer_outputs import ModuleOutputs
from engine.worker.loaded_model import FoundProposer
from engine.worker.mtp import MTP
from engine.worker.prompt_lookup import PromptLookup
from engine.worker.proposer import ModelProposer, Proposer, RowDrafts, Target, TextProposer
from engine.worker.rewind import rewind_unsupported_reason

PROPOSERS: tuple[Proposer, ...] = (MTP(), SeparateModel(), PromptLookup())
"""All kinds, in the order of `EngineConfig.draft_modes`."""


@dataclass(frozen=True)
class LoadedProposer:
    """A proposer whose model drafts, with its module."""

    name: str
    kind: ModelProposer
    module: Any

    @property
    def layer_outputs(self) -> ModuleOutputs | None:
        return self.kind.layer_outputs(self.module)

    def drafting_model(self, target: Target) -> DraftingModel:
        return self.kind.drafting_model(self.module, target)


def with_models() -> list[ModelProposer]:
    """Return the kinds that draft with a model."""
    return [one for one in PROPOSERS if isinstance(one, ModelProposer)]


def find(config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> dict[str, FoundProposer]:
    """Return what is found of each proposer that drafts with a model; see ModelProposer.find.

    Raises:
        EngineFailed: The configuration asks for one that cannot draft, or for two.
    """
    found = {one.name: FoundProposer(one.off_reason, kind=one.name) for one in with_models()}
    candidates = [one for one in with_models() if config.draft_modes.get(one.name) != "off"]
    only = next((one for one in candidates if one.replaces_others and one.asked_for(config)), None)
    for one in candidates:
        if only is None or one is only:
            each = one.find_all(config, model_dir, model_config)
            found |= {name: replace(proposer, kind=one.name) for name, proposer in each.items()}
        elif asked_for := " and ".join(one.asked_for(config)):
            raise EngineFailed(f"{only.name} is configured beside {asked_for}; only one of them can draft")
        else:
            found[one.name] = FoundProposer(f"the configured {only.name} drafts instead", kind=one.name)
    return found


def kind_of(name: str, found: FoundProposer) -> ModelProposer:
    """Return the kind of a proposer that was found."""
    return next(one for one in with_models() if one.name == (found.kind or name))


def loaded_proposers(found: Mapping[str, FoundProposer]) -> list[LoadedProposer]:
    """Return the proposers whose models draft."""
    return [
        LoadedProposer(name, kind_of(name, one), one.module) for name, one in found.items() if one.module is not None
    ]


def drafting_models(loaded: Sequence[LoadedProposer], target: Target) -> DraftingModels | None:
    """Return the models that draft for a target; None without one."""
    models = {one.name: one.drafting_model(target) for one in loaded}
    return DraftingModels(models, target.language_model) if models else None


def check_asked_for(config: EngineConfig, family: str, language_model: LanguageModel) -> None:
    """Check that the proposers that are asked for can draft for a family.

    Args:
        config: The configuration.
        family: model_type of the target.
        language_model: A model of the family, whose weights need not be evaluated.

    Raises:
        EngineFailed: They cannot.
    """
    names = " and ".join(name for one in PROPOSERS if one.needs_rewind for name in one.asked_for(config))
    if names and (reason := rewind_unsupported_reason(language_model)) is not None:
        raise EngineFailed(f"{names} cannot draft for models of the family {family}: {reason}; remove it")


def offered(
    config: EngineConfig, found: Mapping[str, FoundProposer], target: Target, models: Mapping[str, DraftingModel]
) -> tuple[Sequence[Drafts], Mapping[str, str]]:
    """Return the ways to draft, see ModelRunner.drafts, and why proposers cannot draft.

    Args:
        config: The configuration.
        found: The proposers with weights.
        target: The model that is drafted for, whose weights need not be evaluated.
        models: The models that draft, by the names of their proposers.
    """
    drafts: list[Drafts] = []
    reasons: dict[str, str] = {}
    for one in PROPOSERS:
        names = [one.name]
        if isinstance(one, ModelProposer):
            names = [name for name, each in found.items() if kind_of(name, each) is one] or names
        for name in names:
            model = models.get(name) if isinstance(one, ModelProposer) else next(iter(models.values()), None)
            offer = one.offer(config, target, model, found.get(name))
            if isinstance(offer, str):
                reasons[name] = offer
                continue
            lengths = _lengths(config.draft_modes.get(one.name, "auto"), offer)
            drafts += [Drafts(k, name, is_selective=one.is_selective, option=one.name) for k in lengths]
    return tuple(drafts), reasons


def row_drafts(drafts: Sequence[Drafts], token_ids: np.ndarray) -> dict[str, RowDrafts]:
    """Return a row's drafts by each TextProposer among these ways to draft, by name.

    Args:
        drafts: The ways to draft.
        token_ids: int32, the row's tokens so far.
    """
    names = {one.proposer for one in drafts}
    return {
        one.name: one.row_drafts(token_ids) for one in PROPOSERS if isinstance(one, TextProposer) and one.name in names
    }


def _lengths(mode: str | DraftLimits, auto: Sequence[int]) -> Sequence[int]:
    """Return the numbers of draft tokens; with fixed limits those up to the limit, of which the last is used."""
    if not isinstance(mode, DraftLimits):
        return auto
    return [*(k for k in auto if k < mode.max_draft_tokens), mode.max_draft_tokens]
