"""A model as it is opened, with lazy weights, and as it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.worker.expanded_weights import Expansion

READY = "ready"


@dataclass(frozen=True)
class FoundProposer:
    """A proposer with weights, as a start has found it."""

    status: str  # READY, or why it does not draft.
    path: Path | None = None  # Directory of its weights; None without any, or where loading finds it.
    module: Any | None = None  # The library's model or the head; None before it is loaded, and if it does not draft.
    kind: str = ""  # Name of its kind, which is its own name but for the second head and later ones.
    text: str = ""  # Form and source of its weights, for status and log; empty if the path tells.


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read: they are lazy arrays of the files."""

    module: Any  # The mlx_vlm model, cast to the dtype that it computes in.
    path: Path  # Directory of the checkpoint.
    config: dict[str, Any]  # See LoadedModel.
    media_kinds: frozenset[str]  # See LoadedModel.
    max_context_tokens: int  # See LoadedModel.
    vocab_size: int  # Number of logits.
    dtype: str  # Floating dtype that it computes in.
    expansion: Expansion  # Of its quantized weights, which are lazy.
    proposers: Mapping[str, FoundProposer]  # By name, without modules.
    rope_facts: tuple[str, ...]  # What distinguishes states computed with it from those of other settings.


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model."""

    module: Any  # The mlx_vlm model.
    path: Path  # Directory of the checkpoint.
    config: dict[str, Any]  # The checkpoint's configuration, with the rope scaling of the settings.
    media_kinds: frozenset[str]  # Media that it accepts, such as image.
    max_context_tokens: int  # Prompt and answer together.
    vocab_size: int  # Number of logits.
    num_weight_bytes: int  # In memory, with those of the model that drafts.
    dtype: str  # Floating dtype that it computes in.
    quantized_weights: str  # What was done with them.
    proposers: Mapping[str, FoundProposer]  # By name; those of one kind at most have modules.
    fingerprint: str  # See ModelRunner.
