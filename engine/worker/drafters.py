"""Drafters: the models' parts of a decode group, of which one drafts in a step while others store what they read."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from engine.worker.drafter import Drafter, PendingHiddenStates
from engine.worker.drafting_models import DraftingModels
from engine.worker.kv_cache import BatchCache, SequenceCache


class Drafters:
    """A Drafter of each model, by the name of its proposer.

    Args:
        models: The models.
        by_name: Their drafters, in the same order.
    """

    def __init__(self, models: DraftingModels, by_name: dict[str, Drafter]):
        self._models = models
        self.by_name = by_name

    @classmethod
    def of(
        cls,
        models: DraftingModels,
        caches: Sequence[SequenceCache],
        token_id: int,
        hidden: mx.array,
        target: BatchCache,
    ) -> "Drafters":
        """Create the parts of a group of one row.

        Args:
            models: The models.
            caches: The row's cache of each of them.
            token_id: The first token after the row's prompt.
            hidden: What all of them read of the prompt's last token, [1, 1, width].
            target: The group's own cache.
        """
        parts = zip(models.by_name.items(), caches, models.split(hidden), strict=True)
        return cls(
            models,
            {
                name: Drafter.of(model, cache, PendingHiddenStates.of(token_id, own), target)
                for (name, model), cache, own in parts
            },
        )

    @property
    def _all(self) -> list[Drafter]:
        return list(self.by_name.values())

    def join(
        self,
        caches: Sequence[Sequence[SequenceCache]],
        token_ids: Sequence[int],
        hidden: Sequence[mx.array],
        move: bool = False,
    ) -> None:
        """Add rows. When it raises, the rows are as before, if `have` says so.

        Args:
            caches: The cache of each model, by row.
            token_ids: The first token after each row's prompt.
            hidden: See `of`, by row.
            move: See BatchCache.join.
        """
        read, done = [self._models.split(each) for each in hidden], 0
        num_before = self._all[0].num_rows
        try:
            for done, drafter in enumerate(self._all):
                pairs = [
                    PendingHiddenStates.of(*one) for one in zip(token_ids, [own[done] for own in read], strict=True)
                ]
                drafter.join([row[done] for row in caches], pairs, move)
        except Exception:
            for drafter in self._all[:done]:
                with suppress(Exception):  # `have` tells
                    drafter.keep_first(num_before)
            raise

    def have(self, num_rows: int) -> bool:
        """Return whether all parts have so many rows: not after rows have not joined, and the others were lost."""
        return all(drafter.num_rows == num_rows for drafter in self._all)

    def select(self, rows: list[int], num_slots: int, leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """Keep these rows. When it raises, all rows are lost. leaving: see BatchCache.select."""
        for drafter in self._all:
            drafter.select(rows, num_slots, leaving)

    @property
    def layers(self) -> list[Any]:
        """Layers of the models' caches of all rows, model by model."""
        return [layer for drafter in self._all for layer in drafter.layers]

    def row(self, index: int, num_tokens: int) -> tuple[SequenceCache, mx.array | None]:
        """Return one row's state as after a prompt of `num_tokens` tokens; see Drafter.row.

        Returns:
            The layers of all models, and the hidden state [1, 1, width] that waits for them; None where none reads a
            prompt before its last token.
        """
        found = [drafter.row(index, num_tokens) for drafter in self._all]
        layers = [layer for cache, _ in found for layer in cache]
        if not self._models.reads_prompts:
            return layers, None
        hidden = [each for _, each in found]
        return layers, hidden[0] if len(hidden) == 1 else mx.concatenate(hidden, axis=-1)

    def add(
        self, token_ids: mx.array, read: mx.array, kept: mx.array, drafted: str | None, lengths: mx.array, extent: int
    ) -> None:
        """Give the models the pairs of a step.

        Args:
            token_ids: int32 [B, k + 1], the token after each that was computed.
            read: [B, k + 1, width], what all models read of these.
            kept: int32 [B], how many of the pairs each row keeps.
            drafted: Name of the proposer whose model has drafted in the step, and so has read all pairs before; None
                for no model.
            lengths: int32 [B], tokens in the target's cache before the step.
            extent: At least max(lengths) + k + 1.
        """
        for (name, drafter), own in zip(self.by_name.items(), self._models.split(read), strict=True):
            pairs = PendingHiddenStates(token_ids, own, kept, token_ids.shape[1])
            if name == drafted:
                drafter.pending = pairs
            else:
                drafter.skip(pairs, lengths, extent)

    @property
    def pending_state(self) -> list[mx.array]:
        return [array for drafter in self._all for array in drafter.pending.state]

    @property
    def state(self) -> list[mx.array]:
        return [array for drafter in self._all for array in drafter.state]

    @property
    def nbytes(self) -> int:
        return sum(drafter.nbytes for drafter in self._all)
