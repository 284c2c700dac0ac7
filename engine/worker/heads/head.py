"""Interfaces of the forms of MTP heads: how their checkpoints are read, and how they compute."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from engine.worker.kv_cache import SequenceCache
from engine.worker.layer_outputs import ModuleOutputs


class BlockHead(Protocol):
    """The part of a head that drafts a block of tokens in one forward."""

    @property
    def block_size(self) -> int:
        """Tokens of the longest block: the newest token, then the drafts."""
        ...

    @property
    def mask_token_id(self) -> int:
        """The token in the places of the drafts."""
        ...

    def block_states(self, embeds: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Return hidden states [B, L, hidden_size], of which those at the masks become the drafts in their places.

        Args:
            embeds: [B, L, hidden], embeddings of the newest token and of L - 1 masks.
            cache: The layers of a decode group, into which `Head.states` has written all positions before the block.
                What a block writes is overwritten by later tokens.
            positions: int32 [B, L].
        """
        ...


class SharingHead(Protocol):
    """The part of a head that attends to keys and values of the target, and has none of its own.

    It reads no prompts, and of a row only the newest token with the target's hidden state before it.
    """

    @property
    def shared_caches(self) -> Sequence[int]:
        """Which of the target's caches `Head.states` takes, each as its `SeenSlots`, in this order."""
        ...

    def next_hidden(self, states: mx.array) -> mx.array:
        """Return what it reads after a draft in the place of the target's hidden states, [B, L, width].

        Args:
            states: [B, L, hidden_size], of which the draft was sampled.
        """
        ...


class Head(Protocol):
    """A loaded head, an nn.Module."""

    @property
    def as_offset(self) -> bool:
        """Whether its layers take positions from their cache; see Cursor."""
        ...

    @property
    def model_path(self) -> Path:
        """Where it was loaded from."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of its own hidden states."""
        ...

    @property
    def layer_outputs(self) -> ModuleOutputs | None:
        """The target's modules whose outputs it reads; None if it reads the hidden states of which logits are made."""
        ...

    @property
    def embed_tokens(self) -> Any:
        """Its own embedding, or another function of token ids; None for the target's."""
        ...

    @property
    def block(self) -> BlockHead | None:
        """Drafts a block in one forward; None for a head that drafts one token after the other from `states`."""
        ...

    @property
    def sharing(self) -> SharingHead | None:
        """Attends to the target's keys and values; None for a head with a cache of its own."""
        ...

    def make_cache(self) -> SequenceCache:
        """Return an empty cache for one row; a layer with several caches has one entry for each."""
        ...

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Return hidden states [B, L, hidden_size] for `logits`.

        Args:
            embeds: [B, L, hidden], embeddings of the tokens after the hidden states.
            hidden: What it reads of the target, [B, L, width], or its own states [B, L, hidden_size].
            cache: As `make_cache` returns it, or the layers of a decode group; see SharingHead for one without.
            positions: int32 [B, L], of the hidden states.
        """
        ...

    def logits(self, states: mx.array) -> mx.array | None:
        """Return logits [B, L, vocab of the target]; None if the target's output layer makes them of the states."""
        ...


class SharesTarget:
    """The parts of a Head that reads the target's last hidden states and shares its embedding and output layer."""

    layer_outputs = None
    embed_tokens = None
    block = None
    sharing = None

    def logits(self, states: mx.array) -> None:
        return None


class HeadFormat(Protocol):
    """How the checkpoints of some families store a head of one form."""

    @property
    def split_types(self) -> tuple[str, ...]:
        """model_type of the directories of their own into which mlx_vlm.split_mtp writes such heads."""
        ...

    @property
    def tensors(self) -> str:
        """Names of a head's tensors in a checkpoint, for messages."""
        ...

    @property
    def known_code(self) -> Mapping[str, Any] | None:
        """Fields of config.json that may name code, with the values of published checkpoints; None for no such field.

        The code is never run: the form computes the same.
        """
        ...

    def is_in(self, model_dir: Path) -> bool:
        """Return whether a checkpoint has tensors of a head; its configuration does not tell."""
        ...

    def load(self, head_dir: Path, language_model: Any) -> Head:
        """Load a head, with weights as stored and possibly lazy.

        Args:
            head_dir: A checkpoint with a head, or the directory of a split one.
            language_model: The library's language model of the target.

        Raises:
            EngineFailed: The head does not fit the target.
            Exception: Anything else that a damaged checkpoint raises.
        """
        ...

    def check_values(self, head: Head) -> None:
        """Check the values of a loaded head as far as its form tells what is plausible.

        Raises:
            EngineFailed: They are not.
        """
        ...
