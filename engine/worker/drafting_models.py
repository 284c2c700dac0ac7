"""DraftingModels: the models that draft for a target beside each other, as its prompts and decode groups use them.

There is one draft model, or one head or more. Values that several heads read of the target lie beside each other in one
array, so that a state has one array of hidden states for all of them; each has a cache of its own.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import mlx.core as mx

from engine.worker.drafter import DraftingModel
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel


class DraftingModels:
    """The models that draft for a target.

    Args:
        by_name: The models by the names of their proposers, at least one.
        target: The target, which returns what each of several heads reads, in the order of `by_name`.

    Attributes:
        by_name: As given.
        reads_prompts: Whether any of them reads the hidden states of prompts; otherwise they need the last one alone.
    """

    def __init__(self, by_name: Mapping[str, DraftingModel], target: LanguageModel):
        self.by_name = by_name
        self.reads_prompts = any(model.sharing is None for model in self.models)
        self._parts = target.parts_read if len(by_name) > 1 else []

    @property
    def models(self) -> list[DraftingModel]:
        return list(self.by_name.values())

    def make_caches(self) -> list[SequenceCache]:
        """Return an empty cache for one row of each model; see DraftingModel."""
        return [model.make_cache() for model in self.models]

    def begin(self, first_token_id: int, caches: Sequence[SequenceCache]) -> None:
        """Let each model read the first token of a prompt into its empty cache."""
        for model, cache in zip(self.models, caches, strict=True):
            model.begin(first_token_id, cache)

    def read(self, hidden: mx.array | None, token_ids: mx.array) -> mx.array | None:
        """Return what all models read of tokens [B, L], as [B, L, width]. hidden: as the target has returned it."""
        [first, *others] = self.models
        return hidden if others else first.read(hidden, token_ids)

    def split(self, read: mx.array) -> list[mx.array]:
        """Return what each model reads, [B, L, width of the model], of what all read."""
        if not self._parts:
            return [read]
        ends = list(accumulate(width for width, _ in self._parts))
        parts = mx.split(read, ends[:-1], axis=-1)
        return [part.astype(dtype) for part, (_, dtype) in zip(parts, self._parts, strict=True)]

    def prime(self, next_token_ids: mx.array, read: mx.array, caches: Sequence[SequenceCache]) -> None:
        """Launch a chunk of one prompt into the models' caches.

        Args:
            next_token_ids: int32 [1, L], the token after each of those that `read` belongs to.
            read: [1, L, width].
            caches: The caches of the prompt; a model without layers reads none of it.
        """
        for model, own, cache in zip(self.models, self.split(read), caches, strict=True):
            if cache:
                model.prime(next_token_ids, own, cache)
