"""Computes chunks of several prompts in one forward.

Chunks are padded on the right. Attention does not see the padding, which comes after every token of its row and is not
kept. Recurrent layers skip it: at padded positions a state neither decays nor changes, and the convolution's window
ends with the row's own last token. Each prompt gets the caches that it would get alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache, KVCache

from engine.worker.kv_cache import Cursor, SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.mtp import MTPHead
from engine.worker.prefill import Prompt
from engine.worker.quantized_kv import format_of


class BurstKeysValues:
    """One attention layer of all prompts: each appends to its own cache, and attention sees them padded."""

    def __init__(self, caches: Sequence[KVCache], lengths: Sequence[int]):
        """Wrap the prompts' caches. lengths: how many tokens of the forward are each prompt's own, at least 0."""
        self._caches = caches
        self._lengths = lengths
        self._starts = [cache.offset for cache in caches]
        self._format = format_of(caches[0])

    @property
    def offset(self) -> int:
        return max(self._starts)

    def make_mask(
        self, num_new: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        uniform_start = self.offset if len(set(self._starts)) == 1 and not return_array else None
        cursor = Cursor(mx.array(self._starts, mx.int32), self.offset + num_new, uniform_start)
        return cursor.mask(num_new, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head_dim].

        Returns:
            Both with the preceding ones: [B, heads, extent, head_dim].
        """
        for i, (cache, length) in enumerate(zip(self._caches, self._lengths, strict=True)):
            if length:
                cache.update_and_fetch(keys[i : i + 1, :, :length], values[i : i + 1, :, :length])
        if self._format is not None:
            keys, values = self._format.pack(keys, values)
        keys = self._behind([cache.keys for cache in self._caches], keys)
        values = self._behind([cache.values for cache in self._caches], values)
        return (keys, values) if self._format is None else self._format.unpack(keys, values)

    def _behind(self, before: Sequence[Any], new: mx.array) -> mx.array:
        """Return each row's first `start` slots followed by its new ones, padded at the end."""
        if not self.offset:
            return new
        rows = []
        for i, (slots, start) in enumerate(zip(before, self._starts, strict=True)):
            parts = [new[i : i + 1]]
            if start:
                parts.insert(0, slots[..., :start, :])
            if missing := self.offset - start:
                parts.append(mx.zeros((1, new.shape[1], missing, new.shape[3]), new.dtype))
            rows.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
        return mx.concatenate(rows)


class BurstStates:
    """One recurrent layer of all prompts, with slots (convolution window, state), as the library's ArraysCache."""

    lengths = None  # update_window selects each row's window itself

    def __init__(self, caches: Sequence[ArraysCache], lengths: Sequence[int]):
        self._caches = caches
        self._lengths = lengths

    def __getitem__(self, index: int) -> mx.array | None:
        """Return a slot of all prompts [B, ...]; None if no prompt has begun."""
        states = [cache.cache[index] for cache in self._caches]
        like = next((state for state in states if state is not None), None)
        if like is None:
            return None
        return mx.concatenate([mx.zeros_like(like) if state is None else state for state in states])

    def make_mask(self, num_new: int) -> mx.array | None:
        """Return which tokens are a prompt's own, bool [B, num_new]; None if all are."""
        if min(self._lengths) == num_new:
            return None
        return mx.arange(num_new) < mx.array(list(self._lengths), mx.int32)[:, None]

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: None = None) -> None:
        """Store the windows. source [B, width + L, channels]: the window after n tokens is source[:, n : n + width]."""
        for i, (cache, length) in enumerate(zip(self._caches, self._lengths, strict=True)):
            cache.cache[index] = mx.contiguous(source[i : i + 1, length : length + width])

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        output, state = update(self[index], None)[:2]
        for i, cache in enumerate(self._caches):
            cache.cache[index] = mx.contiguous(state[i : i + 1])
        mx.async_eval([cache.cache[index] for cache in self._caches])  # free the batched state before the next layer
        return output, state


class BurstPrefill:
    """Advances several prompts in one forward. Requires a model with explicit positions."""

    def __init__(self, language_model: LanguageModel, head: MTPHead | None):
        self._language_model = language_model
        self._head = head

    def advance(self, prompts: Sequence[Prompt], lengths: Sequence[int], padding_id: int = 0) -> mx.array | None:
        """Compute the next tokens of each prompt in one forward, evaluated. If it raises, all of the prompts are lost.

        Args:
            prompts: Prompts of text only.
            lengths: Tokens of each to compute, at least 1.
            padding_id: Token at padded positions; it has no effect.

        Returns:
            Logits [E, 1, vocab] of the last token of each of the E complete prompts; None without one.
        """
        starts = [prompt.done for prompt in prompts]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        spans = list(zip(prompts, starts, ends, strict=True))
        token_ids = _padded([prompt.token_ids[start:end] for prompt, start, end in spans], padding_id)
        positions = [_padded([p.positions[axis, 0, start:end] for p, start, end in spans]) for axis in range(3)]
        layers = _layers([prompt.cache for prompt in prompts], lengths)
        hidden = self._language_model.states(mx.array(token_ids), layers, np.stack(positions))
        for prompt, end in zip(prompts, ends, strict=True):
            prompt.done = end
        last = mx.take_along_axis(hidden, mx.array(list(lengths), mx.int32)[:, None, None] - 1, axis=1)
        complete = [i for i, prompt in enumerate(prompts) if prompt.done == len(prompt.token_ids)]
        logits = self._language_model.logits(last[mx.array(complete)]) if complete else None
        if self._head is not None:
            self._prime(self._head, prompts, starts, hidden)
            for i, prompt in enumerate(prompts):
                prompt.hidden = mx.contiguous(last[i : i + 1])
        waiting = [prompt.hidden for prompt in prompts if prompt.hidden is not None]
        states = [layer.state for prompt in prompts for layer in prompt.layers]
        mx.eval(states, waiting, [] if logits is None else logits)
        return logits

    def _prime(self, head: MTPHead, prompts: Sequence[Prompt], starts: Sequence[int], hidden: mx.array) -> None:
        """Let the head read the new hidden states of each prompt; see Prefill._prime."""
        starts = [start - (prompt.hidden is not None) for prompt, start in zip(prompts, starts, strict=True)]
        spans = list(zip(prompts, starts, strict=True))
        lengths = [prompt.done - 1 - start for prompt, start in spans]
        if not any(lengths):
            return
        none = mx.zeros((1, 1, hidden.shape[2]), hidden.dtype)
        waiting = mx.concatenate([none if prompt.hidden is None else prompt.hidden for prompt in prompts])
        skipped = mx.array([[prompt.hidden is None] for prompt in prompts], mx.int32)
        at = mx.minimum(skipped + mx.arange(max(lengths)), hidden.shape[1])
        before = mx.take_along_axis(mx.concatenate([waiting, hidden], axis=1), at[..., None], axis=1)
        behind = _padded([prompt.successors[start : prompt.done - 1] for prompt, start in spans])
        caches = [prompt.head_cache for prompt in prompts if prompt.head_cache is not None]
        first = mx.array([cache[0].offset for cache in caches], mx.int32)
        head(mx.array(behind), before, _layers(caches, lengths), first[:, None] + mx.arange(max(lengths)))


def _layers(caches: Sequence[SequenceCache], lengths: Sequence[int]) -> list[Any]:
    """Combine the prompts' caches, layer by layer."""
    return [
        BurstKeysValues(layers, lengths) if isinstance(layers[0], KVCache) else BurstStates(layers, lengths)
        for layers in zip(*caches, strict=True)
    ]


def _padded(rows: Sequence[np.ndarray], padding: int = 0) -> np.ndarray:
    """Return the rows as int32 [B, longest], padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), padding, np.int32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
