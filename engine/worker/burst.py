"""Computes chunks of several prompts in one forward.

Chunks are padded on the right. Attention does not see the padding, which comes after every token of its row and is not
kept. Recurrent layers skip it, where the family can: at padded positions a state neither decays nor changes, and the
convolution's window ends with the row's own last token. Otherwise prompts share forwards in which all of them have the
same number of tokens. Each prompt gets the caches that it would get alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache

from engine.worker.chunk_layer import ChunkedCache, same_chunk
from engine.worker.drafter import DraftingModel
from engine.worker.kv_cache import Cursor, SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.pool_layer import PooledCache, PoolInputs, Windows, at_slots, window_positions
from engine.worker.prefill import PromptState, waits
from engine.worker.quantized_kv import format_of
from engine.worker.recurrent_layer import stacked
from engine.worker.rewind import has_recurrent_layers
from engine.worker.row_kinds import is_recurrent, kind_of
from engine.worker.window_layer import last_tokens

EQUAL_LENGTHS = "of equal lengths: its recurrent layers do not skip padding"
"""Status of a family whose prompts of unlike lengths share several forwards, of equal lengths each."""

PADDING_IDS = (0, 1, 7, 100)
"""Tokens with which `skips_padding` pads: some vocabularies have equal embeddings for unused tokens."""

MORE_PADDING = 60
"""Further padding with which `skips_padding` finds states that decay by the same factor for every padding token."""

ROUNDING = 0.05
"""Share of a state's largest value by which padding may change it."""

_Library: Any = ArraysCache  # some families write their states only into instances of it


@dataclass(frozen=True)
class Forward:
    """The rows of a shared forward."""

    lengths: Sequence[int]
    """How many tokens of the forward are each prompt's own, at least 0."""
    as_offset: bool
    """See kv_cache.Cursor."""

    @cached_property
    def own(self) -> mx.array | None:
        """`lengths` as int32 [B]; None if no token is padding."""
        return mx.array(list(self.lengths), mx.int32) if min(self.lengths) < max(self.lengths) else None


class BurstAttention:
    """One attention layer of all prompts: each appends to its own cache, and attention sees them padded.

    Args:
        caches: The prompts' caches: of all tokens, or of a sliding window.
        forward: The forward.
    """

    def __init__(self, caches: Sequence[Any], forward: Forward):
        self._caches = caches
        self._lengths = forward.lengths
        self._as_offset = forward.as_offset
        self._starts = [cache.offset for cache in caches]
        self._window = kind_of(caches[0]).window(caches[0])
        if self._window:
            self.max_size = self._window
        self._before = [last_tokens(cache) if self._window and cache.offset else None for cache in caches]
        self._num_before = [
            start if before is None else before[0].shape[2]
            for start, before in zip(self._starts, self._before, strict=True)
        ]
        self._format = format_of(caches[0])

    @property
    def offset(self) -> int | mx.array:
        is_uniform = len(set(self._starts)) == 1
        return mx.array(self._starts, mx.int32) if self._as_offset and not is_uniform else max(self._starts)

    @property
    def starts(self) -> mx.array:
        """int32 [B], the tokens of each prompt before the forward."""
        return mx.array(self._starts, mx.int32)

    @property
    def keys(self) -> mx.array:
        """The first prompt's, to which some families add a dependency so that they are evaluated together."""
        return self._caches[0].keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._caches[0].keys = keys

    @property
    def values(self) -> mx.array:
        return self._caches[0].values

    def make_mask(
        self, num_new: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        window = min((size for size in (window_size, self._window) if size), default=None)
        first, extent = max(self._num_before), max(self._num_before) + num_new
        uniform_start = first if len(set(self._num_before)) == 1 and not return_array else None
        if uniform_start is not None and window is not None and extent <= window:
            window = None
        return Cursor(mx.array(self._num_before, mx.int32), extent, uniform_start).mask(num_new, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head_dim].

        Returns:
            Both with the preceding ones: [B, heads, extent, head_dim].
        """
        for i, (cache, length) in enumerate(zip(self._caches, self._lengths, strict=True)):
            if length:
                new = keys[i : i + 1, :, :length], values[i : i + 1, :, :length]
                cache.update_and_fetch(*map(mx.contiguous, new))
        if self._format is not None:
            keys, values = self._format.pack(keys, values)
        if any(self._num_before):  # the slots before are read after the write, which is in place then
            before = [
                (cache.keys, cache.values) if window is None else window
                for cache, window in zip(self._caches, self._before, strict=True)
            ]
            keys = self._behind([slots[0] for slots in before], keys)
            values = self._behind([slots[1] for slots in before], values)
        return (keys, values) if self._format is None else self._format.unpack(keys, values)

    def _behind(self, before: Sequence[Any], new: mx.array) -> mx.array:
        """Return each row's preceding slots followed by its new ones, padded at the end."""
        rows = []
        for i, (slots, num_before) in enumerate(zip(before, self._num_before, strict=True)):
            parts = [new[i : i + 1]]
            if num_before:
                parts.insert(0, slots[..., :num_before, :])
            if missing := max(self._num_before) - num_before:
                parts.append(mx.zeros((1, new.shape[1], missing, new.shape[3]), new.dtype))
            rows.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
        return mx.concatenate(rows)


class BurstChunks(BurstAttention):
    """One attention layer of all prompts whose tokens see only their own chunk."""

    def make_mask(self, num_new: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which slots each new token sees: bool [B, 1, num_new, extent]."""
        starts, num_before = self.starts, mx.array(self._num_before, mx.int32)
        positions = (starts - num_before)[:, None] + mx.arange(max(self._num_before) + num_new)
        own = starts[:, None] + mx.arange(num_new)
        return same_chunk(positions[:, None, None], own[:, None, :, None], self._caches[0].max_size)


class BurstPoolInputs(BurstAttention):
    """The values and gates of all prompts from which a pool makes its next entries."""

    def update_windows(self, kv: mx.array, gate: mx.array, ratio: int, num_before: int) -> Windows:
        """Append values and gates [B, L, dim]; return all windows that may be complete."""
        fetched = self.update_and_fetch(kv[:, None], gate[:, None])
        first, positions = window_positions(self.starts, kv.shape[1], ratio, num_before)
        slots = positions - (self.starts - mx.array(self._num_before, mx.int32))[:, None]
        pairs = zip(self._starts, self._lengths, strict=True)
        kv, gate = at_slots(fetched, slots)
        return kv, gate, first, [(start + new) // ratio - start // ratio for start, new in pairs]


class BurstPool:
    """The entries of all prompts' pools: each appends its own, and attention sees them padded."""

    def __init__(self, caches: Sequence[PooledCache], forward: Forward):
        self._caches = caches

    def write(self, entries: mx.array, num_complete: Sequence[int]) -> mx.array:
        """Append each prompt's first entries of [B, n, dim]; return all, [B, slots, dim]."""
        rows = [
            cache.write(mx.contiguous(entries[i : i + 1]), count)
            for i, (cache, count) in enumerate(zip(self._caches, num_complete, strict=True))
        ]
        longest = max(row.shape[1] for row in rows)
        return mx.concatenate([mx.pad(row, [(0, 0), (0, longest - row.shape[1]), (0, 0)]) for row in rows])


class BurstStates(_Library):
    """One recurrent layer of all prompts, with slots (convolution window, state), as the library's ArraysCache."""

    left_padding = None

    def __init__(self, caches: Sequence[ArraysCache], forward: Forward):
        self._caches = caches
        self._own = forward.own
        self._num_own = forward.lengths

    @property
    def lengths(self) -> mx.array | None:
        return self._own

    @property
    def rows(self) -> list[tuple[ArraysCache, int]]:
        """The prompts' caches, with the number of each prompt's own tokens."""
        return list(zip(self._caches, self._num_own, strict=True))

    def __getitem__(self, index: int) -> mx.array | None:
        """Return a slot of all prompts [B, ...]; None if no prompt has begun."""
        states = [cache.cache[index] for cache in self._caches]
        like = next((state for state in states if state is not None), None)
        if like is None:
            return None
        return stacked([mx.zeros_like(like) if state is None else state for state in states])

    def __setitem__(self, index: int, value: mx.array) -> None:
        """Store a slot of all prompts; the family has selected the rows' own values."""
        for i, cache in enumerate(self._caches):
            cache.cache[index] = mx.contiguous(value[i : i + 1])
        mx.async_eval([cache.cache[index] for cache in self._caches])  # free the batched state before the next layer

    def make_mask(self, num_new: int) -> mx.array | None:
        """Return which tokens are a prompt's own, bool [B, num_new]; None if all are."""
        return None if self._own is None else mx.arange(num_new) < self._own[:, None]

    def advance(self, num_new: int) -> None:
        """Do nothing: the layer serves one forward."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None) -> None:
        """Store the windows. source [B, width + L, channels]: the window after n tokens is source[:, n : n + width]."""
        for i, (cache, length) in enumerate(self.rows):
            cache.cache[index] = mx.contiguous(source[i : i + 1, length : length + width])

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        output, state = update(self[index], None)[:2]
        self[index] = state
        return output, state


LAYERS: dict[type, Callable[[Sequence[Any], Forward], Any]] = {
    ArraysCache: BurstStates,
    PooledCache: BurstPool,
    ChunkedCache: BurstChunks,
    PoolInputs: BurstPoolInputs,
}
"""Class of a row's cache -> the layer of all prompts; BurstAttention for all others."""


class BurstPrefill:
    """Advances several prompts in one forward. Requires `LanguageModel.selects_positions`."""

    def __init__(self, language_model: LanguageModel, head: DraftingModel | None):
        self._language_model = language_model
        self._head = head

    @cached_property
    def skips_padding(self) -> bool:
        """Whether padding tokens leave recurrent states as they are; computes a few short forwards.

        The states must be the same bit by bit for other padding, and but for rounding for more of it, which other
        kernels may compute. Rounding of low precision grows with the layers (in bfloat16 to 0.18 of a state in 32
        layers, and to all of it in 40 layers with experts, which rounding chooses), so there the first recurrent layer
        decides.
        """
        if not has_recurrent_layers(self._language_model):
            return True
        first, *others = [self._padded_states(padding_id) for padding_id in PADDING_IDS]
        if not all(mx.array_equal(*pair).item() for other in others for pair in zip(first, other, strict=True)):
            return False
        return self._differ_by_rounding(first, self._padded_states(PADDING_IDS[0], MORE_PADDING))

    @cached_property
    def begins_with_zeros(self) -> bool:
        """Whether recurrent layers begin a prompt as if its states were zeros; computes two short forwards.

        RecurrentGemma does not normalize the input of a prompt's first token, but that of any token behind a state.
        """
        if not has_recurrent_layers(self._language_model):
            return True
        begun = self._states_of_a_token(None)
        return self._differ_by_rounding(begun, self._states_of_a_token([mx.zeros_like(state) for state in begun]))

    def _states_of_a_token(self, states: Sequence[mx.array] | None) -> list[mx.array]:
        """Return the recurrent states after one token behind the given ones, None for those of a new prompt."""
        caches = self._language_model.make_cache()
        recurrent: list[Any] = [layer for layer in caches if is_recurrent(layer)]
        if states is not None:
            left = iter(states)
            for layer in recurrent:
                layer.cache = [next(left) for _ in layer.cache]
        positions = np.zeros((3, 1, 1), np.int32)
        self._language_model.extend(mx.array([[3]]), None, self._layers([caches], [1]), positions, launch=False)
        return [slot for layer in recurrent for slot in layer.cache]

    def _differ_by_rounding(self, states: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
        """Return whether recurrent states differ by no more than rounding: of which layers says `skips_padding`."""
        first = next(layer for layer in self._language_model.make_cache() if is_recurrent(layer))
        is_exact = all(state.dtype == mx.float32 for state in states)
        num_compared = len(states) if is_exact else len(first.cache)
        pairs = zip(states[:num_compared], others[:num_compared], strict=True)
        return all(_nearly_equal(*pair) for pair in pairs)

    def _padded_states(self, padding_id: int, num_more: int = 0) -> list[mx.array]:
        """Return the recurrent states after two padded forwards, the second of which continues the first."""
        caches = [self._language_model.make_cache() for _ in range(2)]
        for start, lengths in ((0, [1, 3]), (1, [2, 1])):
            layers = self._layers(caches, lengths)
            token_ids = _padded([np.full(length, 3) for length in lengths], padding_id)
            token_ids = np.pad(token_ids, ((0, 0), (0, num_more)), constant_values=padding_id)
            positions = np.broadcast_to(np.arange(start, start + token_ids.shape[1]), (3, *token_ids.shape))
            self._language_model.extend(mx.array(token_ids), None, layers, positions, launch=False)
        recurrent: list[Any] = [layer for cache in caches for layer in cache if is_recurrent(layer)]
        return [slot for layer in recurrent for slot in layer.cache]

    def advance(self, prompts: Sequence[PromptState], lengths: Sequence[int], padding_id: int = 0) -> mx.array | None:
        """Compute the next tokens of each prompt in one forward, evaluated. If it raises, all of the prompts are lost.

        Where recurrent layers do not skip padding, it is one forward per distinct length, and where they do not begin
        with zeros, prompts that begin are computed apart from those that continue.

        Args:
            prompts: Prompts of text only.
            lengths: Tokens of each to compute, at least 1.
            padding_id: Token at padded positions; it has no effect.

        Returns:
            Logits [E, 1, vocab] of the last token of each of the E complete prompts; None without one.
        """
        has_begun = [prompt.done > 0 and not self.begins_with_zeros for prompt in prompts]
        logits: dict[int, mx.array] = {}
        for begun in sorted(set(has_begun)):
            group = [i for i, each in enumerate(has_begun) if each == begun]
            done = 0
            longest = max(lengths[i] for i in group)
            for end in [longest] if self.skips_padding else sorted({lengths[i] for i in group}):
                rows = [i for i in group if lengths[i] > done]
                own = [min(lengths[i], end) - done for i in rows]
                found = self._forward([prompts[i] for i in rows], own, padding_id)
                logits |= {i: each for i, each in zip(rows, found, strict=True) if each is not None}
                done = end
        return mx.concatenate([logits[i] for i in sorted(logits)]) if logits else None

    def _forward(
        self, prompts: Sequence[PromptState], lengths: Sequence[int], padding_id: int
    ) -> list[mx.array | None]:
        """Compute one forward, evaluated; return each prompt's logits [1, 1, vocab], None for one not complete."""
        starts = [prompt.done for prompt in prompts]
        for prompt, length in zip(prompts, lengths, strict=True):
            prompt.done += length
        spans = list(zip(prompts, starts, strict=True))
        token_ids = mx.array(_padded([prompt.token_ids[start : prompt.done] for prompt, start in spans], padding_id))
        positions = np.stack(
            [_padded([prompt.positions[axis, 0, start : prompt.done] for prompt, start in spans]) for axis in range(3)]
        )
        layers = self._layers([prompt.cache for prompt in prompts], lengths)
        complete = [i for i, prompt in enumerate(prompts) if prompt.done == len(prompt.token_ids)]
        logits = None
        if complete:
            rows, last = mx.array(complete, mx.int32), mx.array([lengths[i] - 1 for i in complete], mx.int32)
            logits, hidden = self._language_model.extend_to_end(
                token_ids, None, layers, positions, lambda hidden: hidden[rows, last][:, None]
            )
        else:
            hidden = self._language_model.extend(token_ids, None, layers, positions, launch=False)
        if self._head is not None and (read := self._head.read(hidden, token_ids)) is not None:
            self._prime(self._head, prompts, starts, read)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                if waits(self._head, prompt):
                    prompt.hidden = mx.contiguous(read[i : i + 1, length - 1 : length])
        waiting = [prompt.hidden for prompt in prompts if prompt.hidden is not None]
        mx.eval([layer.state for prompt in prompts for layer in prompt.layers], waiting, logits)
        at = {i: n for n, i in enumerate(complete)}
        return [logits[at[i] : at[i] + 1] if logits is not None and i in at else None for i in range(len(prompts))]

    def _prime(
        self, head: DraftingModel, prompts: Sequence[PromptState], starts: Sequence[int], hidden: mx.array
    ) -> None:
        """Let the head read the new hidden states of each prompt; see Prefill._prime."""
        starts = [start - (prompt.hidden is not None) for prompt, start in zip(prompts, starts, strict=True)]
        spans = list(zip(prompts, starts, strict=True))
        lengths = [prompt.done - 1 - start for prompt, start in spans]
        if not any(lengths) or not prompts[0].head_cache:
            return
        none = mx.zeros((1, 1, hidden.shape[2]), hidden.dtype)
        waiting = mx.concatenate([none if prompt.hidden is None else prompt.hidden for prompt in prompts])
        skipped = mx.array([[prompt.hidden is None] for prompt in prompts], mx.int32)
        at = mx.minimum(skipped + mx.arange(max(lengths)), hidden.shape[1])
        before = mx.take_along_axis(mx.concatenate([waiting, hidden], axis=1), at[..., None], axis=1)
        behind = _padded([prompt.successors[start : prompt.done - 1] for prompt, start in spans])
        caches = [prompt.head_cache for prompt in prompts if prompt.head_cache is not None]
        first = mx.array([cache[0].offset for cache in caches], mx.int32)
        layers = _layers(caches, lengths, head.as_offset)
        head(mx.array(behind), before, layers, first[:, None] + mx.arange(max(lengths)))

    def _layers(self, caches: Sequence[SequenceCache], lengths: Sequence[int]) -> list[Any]:
        return _layers(caches, lengths, as_offset=not self._language_model.explicit_positions)


def _nearly_equal(one: mx.array, other: mx.array) -> bool:
    """Return whether two states differ by at most ROUNDING."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool((mx.abs(one - other).max() <= ROUNDING * mx.abs(one).max()).item())


def _layers(caches: Sequence[SequenceCache], lengths: Sequence[int], as_offset: bool) -> list[Any]:
    """Combine the prompts' caches, layer by layer. as_offset: see kv_cache.Cursor."""
    forward = Forward(lengths, as_offset)
    return [LAYERS.get(type(rows[0]), BurstAttention)(rows, forward) for rows in zip(*caches, strict=True)]


def _padded(rows: Sequence[np.ndarray], padding: int = 0) -> np.ndarray:
    """Return the rows as int32 [B, longest], padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), padding, np.int32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
