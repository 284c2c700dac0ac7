"""Drafts of a decode group by a model: a head (worker/drafting_head.py) or a draft model (worker/draft_model.py).

The model reads pairs (token x[p+1], hidden state h[p]) for p = 0, 1, 2, ... Pairs from decoding wait in a
`PendingHiddenStates` until the next draft, also through steps without drafts. A head that shares the target's keys and
values needs only the newest pair, and no cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from engine.worker.draft_block import DraftBlock
from engine.worker.heads.head import SharingHead
from engine.worker.kv_cache import BatchCache, SequenceCache

CATCH_UP_TOKENS = 128  # pairs per forward when the head catches up
MAX_PENDING = 128  # pending pairs per row: hidden states take as much memory as an attention layer's keys and values


class DraftingModel(Protocol):
    """The interface of a model that drafts: a head, or a separate model."""

    lead: int
    """Entries of its cache before that of the first pair (token 1, hidden state 0)."""
    as_offset: bool
    """See Cursor."""
    block: DraftBlock | None
    """Drafts all tokens of a step in one forward; None if the model reads each draft before the next one."""
    sharing: SharingHead | None
    """Attends to the target's keys and values; None if the model has a cache of its own."""

    def make_cache(self) -> SequenceCache: ...
    def begin(self, first_token_id: int, cache: SequenceCache) -> None: ...
    def prime(self, next_token_ids: mx.array, hidden: mx.array, cache: SequenceCache) -> None: ...
    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array: ...
    def logits(self, hidden: mx.array) -> mx.array: ...
    def read(self, hidden: mx.array | None, token_ids: mx.array) -> mx.array | None: ...


@dataclass(slots=True, eq=False)
class PendingHiddenStates:
    """Pairs that the head has not read yet, left-justified."""

    token_ids: mx.array  # int32 [B, W].
    hidden: mx.array  # [B, W, hidden].
    count: mx.array  # int32 [B] >= 1, on the device: pairs of each row.
    bound: int  # On the host: at least max(count), at most W.

    @classmethod
    def of(cls, token_id: int, hidden: mx.array) -> "PendingHiddenStates":
        """Return the first token after a prompt with the prompt's last hidden state [1, 1, hidden]."""
        return cls(mx.array([[token_id]], mx.int32), hidden, mx.array([1], mx.int32), 1)

    def joined(self, other: "PendingHiddenStates") -> "PendingHiddenStates":
        width = max(self.bound, other.bound)
        ids = mx.concatenate([_to_width(self.token_ids, width), _to_width(other.token_ids, width)])
        hidden = mx.concatenate([_to_width(self.hidden, width), _to_width(other.hidden, width)])
        return PendingHiddenStates(ids, hidden, mx.concatenate([self.count, other.count]), width)

    def select(self, rows: mx.array) -> "PendingHiddenStates":
        return PendingHiddenStates(self.token_ids[rows], self.hidden[rows], self.count[rows], self.bound)

    def extended(self, new: "PendingHiddenStates") -> "PendingHiddenStates":
        """Append pairs; there must be room for them within MAX_PENDING."""
        width, bound = self.token_ids.shape[1], self.bound + new.bound
        if bound > width:
            width = max(bound, min(2 * width, MAX_PENDING))
        at = self.count[:, None] + mx.arange(new.bound)
        ids = mx.put_along_axis(_to_width(self.token_ids, width), at, new.token_ids, axis=1)
        at = mx.broadcast_to(at[..., None], new.hidden.shape)
        rows = mx.put_along_axis(_to_width(self.hidden, width), at, new.hidden, axis=1)
        return PendingHiddenStates(ids, rows, self.count + new.count, bound)

    @property
    def state(self) -> list[mx.array]:
        return [self.token_ids, self.hidden, self.count]

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + self.hidden.nbytes


class Drafter:
    """The head's part of a decode group: its cache and pending pairs, in the order of the target's rows."""

    def __init__(self, head: DraftingModel, cache: BatchCache, pending: PendingHiddenStates, target: BatchCache):
        self._head = head
        self._cache = cache
        self.pending = pending
        self._target = target

    @classmethod
    def of(
        cls, head: DraftingModel, cache: SequenceCache, pending: PendingHiddenStates, target: BatchCache
    ) -> "Drafter":
        """Create the part of a group of one row, whose cache this is. target: the group's own cache."""
        return cls(head, BatchCache.of(cache, head.as_offset), pending, target)

    def join(self, caches: Sequence[SequenceCache], new: Sequence[PendingHiddenStates], move: bool = False) -> None:
        """Add rows. When it raises, the rows are as before. move: see BatchCache.join."""
        joined = reduce(PendingHiddenStates.joined, new, self.pending)
        self._cache.join(caches, move)
        self.pending = joined

    def select(self, rows: list[int], num_slots: int, leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """Keep these rows. When it raises, all rows are lost. leaving: see BatchCache.select."""
        pending = self.pending.select(mx.array(rows, mx.int32))
        self._cache.select(rows, num_slots, leaving)
        self.pending = pending

    def keep_first(self, num_rows: int) -> None:
        """Keep the first rows, in their slots: undoes `join`."""
        self.select(list(range(num_rows)), self._cache.num_slots)

    @property
    def num_rows(self) -> int:
        return len(self.pending.count)

    @property
    def layers(self) -> list[Any]:
        """Layers of the head's cache of all rows."""
        return self._cache.layers

    def draft(
        self, num_drafts: int, lengths: mx.array, extent: int, choose: Callable[[mx.array, int], mx.array]
    ) -> mx.array:
        """Draft the tokens after the newest ones.

        Args:
            num_drafts: Drafts per row.
            lengths: int32 [B], tokens in the target's cache.
            extent: At least max(lengths).
            choose: choose(hidden [B, n, hidden], i) samples the n drafts from i on, int32 [B, n].

        Returns:
            int32 [B, num_drafts].
        """
        if self._head.sharing is not None:
            return self._draft_sharing(self._head.sharing, num_drafts, lengths, extent, choose)
        hidden = self._catch_up(lengths, extent)
        if self._head.block is not None:
            return choose(self._block_states(self._head.block, num_drafts, lengths, extent), 0)
        drafts = [choose(hidden, 0)]
        for i in range(1, num_drafts):
            at = lengths + (i - 1 + self._head.lead)
            cache = self._cache.at(at, extent + i + self._head.lead)
            hidden = self._head(drafts[-1], hidden, cache, at[:, None])
            drafts.append(choose(hidden, i))
        return mx.concatenate(drafts, axis=1)

    def _draft_sharing(
        self,
        sharing: SharingHead,
        num_drafts: int,
        lengths: mx.array,
        extent: int,
        choose: Callable[[mx.array, int], mx.array],
    ) -> mx.array:
        """Draft from the newest pair, all tokens at the position of its hidden state."""
        last = (self.pending.count - 1)[:, None]
        token = mx.take_along_axis(self.pending.token_ids, last, axis=1)
        hidden = mx.take_along_axis(self.pending.hidden, last[..., None], axis=1)
        seen = [self._target.layers[i].seen_slots(lengths, extent) for i in sharing.shared_caches]
        drafts = list[mx.array]()
        for i in range(num_drafts):
            states = self._head(token, hidden, seen, lengths[:, None] - 1)
            token, hidden = choose(states, i), sharing.next_hidden(states)
            drafts.append(token)
        return mx.concatenate(drafts, axis=1)

    def _block_states(self, block: DraftBlock, num_drafts: int, lengths: mx.array, extent: int) -> mx.array:
        """Return the hidden states [B, num_drafts, hidden] of a block after the pairs that the head has read."""
        newest = mx.take_along_axis(self.pending.token_ids, (self.pending.count - 1)[:, None], axis=1)
        at = lengths + self._head.lead
        # The block is written after each row's end, where its next pairs will be written.
        cache = self._cache.at(at, extent + num_drafts + 1 + self._head.lead)
        return block.states(newest, cache, at[:, None] + mx.arange(num_drafts + 1))

    def row(self, index: int, num_tokens: int) -> tuple[SequenceCache, mx.array]:
        """Return one row's state as after a prompt of `num_tokens` tokens. Waits for the device.

        All pending pairs but the last go into a copy of the row's cache; the group does not change.

        Returns:
            Its cache, which has no layers with a head that shares the target's keys and values, and the pending hidden
            state [1, 1, hidden].
        """
        num_waiting = int(np.array(self.pending.count)[index])
        last = num_waiting - 1
        ids, hidden = self.pending.token_ids[index : index + 1], self.pending.hidden[index : index + 1]
        if self._head.sharing is not None:
            return [], hidden[:, last:num_waiting]
        cache = self._cache.row(index, num_tokens - num_waiting + self._head.lead)
        if last:
            self._head.prime(ids[:, :last], hidden[:, :last], cache)
        return cache, hidden[:, last:num_waiting]

    def skip(self, new: PendingHiddenStates, lengths: mx.array, extent: int) -> None:
        """Store the pairs of a step that the head did not draft as pending.

        Args:
            new: The pairs.
            lengths: int32 [B], tokens in the target's cache before the step.
            extent: At least max(lengths) + new.bound.
        """
        if self._head.sharing is not None:
            self.pending = new
            return
        # A row with fewer pairs than others gets garbage after its end.
        if self.pending.bound + new.bound > min((MAX_PENDING, *(layer.margin for layer in self.layers))):
            self._catch_up(lengths, extent)
            self.pending = new
            mx.async_eval(self._cache.state)
        else:
            self.pending = self.pending.extended(new)

    def _catch_up(self, lengths: mx.array, extent: int) -> mx.array:
        """Let the head read all pending pairs; return the hidden state [B, 1, hidden] after each row's last pair."""
        pending, outputs = self.pending, []
        start, lead = lengths - pending.count + self._head.lead, self._head.lead
        for begin in range(0, pending.bound, CATCH_UP_TOKENS):
            end = min(begin + CATCH_UP_TOKENS, pending.bound)
            at = start + begin
            # A row with fewer pairs writes garbage after its end, where its next pairs will be written.
            cache = self._cache.at(at, extent + end + lead)
            positions = at[:, None] + mx.arange(end - begin)
            outputs.append(self._head(pending.token_ids[:, begin:end], pending.hidden[:, begin:end], cache, positions))
        hidden = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        return mx.take_along_axis(hidden, (pending.count - 1)[:, None, None], axis=1)

    @property
    def state(self) -> list[mx.array]:
        return [*self.pending.state, *self._cache.state]

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes + self.pending.nbytes


def _to_width(array: mx.array, width: int) -> mx.array:
    missing = width - array.shape[1]
    if missing > 0:
        return mx.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
    return array[:, :width]
