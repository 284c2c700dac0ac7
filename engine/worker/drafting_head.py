"""DraftingHead: a head of any form (heads/head.py), which predicts the token after the next from hidden states.

It reads pairs (token x[p+1], hidden state h[p]) for p = 0, 1, 2, ... and needs all of them: a head that has not read
the prompt cannot copy from it. It reads prompts chunk by chunk with their prefill, and pairs from decoding before it
drafts (worker/drafter.py).
"""

from functools import cached_property
from typing import Any

import mlx.core as mx

from engine.worker.draft_block import DraftBlock
from engine.worker.heads.head import Head
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.layer_caches import kv_formats
from engine.worker.quantized_kv import UNQUANTIZED_BITS, KVFormat, QuantizedKVCache


class DraftingHead:
    """Drafts with a head for its target. Implements DraftingModel."""

    lead = 0

    def __init__(self, head: Head, language_model: LanguageModel):
        self.as_offset = head.as_offset
        self.block = None if head.block is None else DraftBlock(head.block, self._embed)
        self.sharing = head.sharing
        self._head = head
        self._language_model = language_model

    def make_cache(self) -> SequenceCache:
        """Return an empty cache for one row, with arrays of 0 slots: a prompt of one token has no first pair.

        That of a head that shares the target's keys and values has no layer.

        Raises:
            ValueError: Keys and values cannot be stored with `kv_cache.bits`.
        """
        caches = self._head.make_cache()
        for i, (kv_format, keys, values) in enumerate(self._empty_layers):
            caches[i] = caches[i] if kv_format is None else QuantizedKVCache(kv_format)
            caches[i].keys, caches[i].values = keys, values
        return caches

    @cached_property
    def _empty_layers(self) -> list[tuple[KVFormat | None, mx.array, mx.array]]:
        """Format, keys and values of each layer without a token, shaped like those of one that is not computed."""
        cache, token = self._head.make_cache(), mx.zeros((1, 1), mx.int32)
        if not cache:
            return []
        embeds = self._embed(token)
        self._head.states(embeds, mx.zeros((1, 1, self._head.hidden_size), embeds.dtype), cache, token)
        bits = self._language_model.kv_bits
        formats = [None] * len(cache) if bits == UNQUANTIZED_BITS else kv_formats(cache, bits)
        none = [(_no_slots_of(layer.keys), _no_slots_of(layer.values)) for layer in cache]
        pairs = zip(formats, none, strict=True)
        return [(one, *(arrays if one is None else one.zeros(0))) for one, arrays in pairs]

    def begin(self, first_token_id: int, cache: SequenceCache) -> None:
        """Do nothing: the head does not read the first token of a prompt."""

    def read(self, hidden: mx.array | None, token_ids: mx.array) -> mx.array | None:
        """Return what LanguageModel has returned for the head to read, [B, L, width]."""
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the head's output layer or the target's: [B, L, hidden] -> [B, L, vocab]."""
        own = self._head.logits(hidden)
        return self._language_model.logits(hidden) if own is None else own

    def _embed(self, token_ids: mx.array) -> mx.array:
        own = self._head.embed_tokens
        return self._language_model.embed(token_ids) if own is None else own(token_ids)

    def prime(self, next_token_ids: mx.array, hidden: mx.array, cache: SequenceCache) -> None:
        """Launch a chunk of one prompt.

        Args:
            next_token_ids: int32 [1, L], the token after each of the hidden states.
            hidden: [1, L, hidden].
            cache: The head's cache of the prompt.
        """
        start = cache[0].offset
        self(next_token_ids, hidden, cache, mx.arange(start, start + hidden.shape[1])[None])
        mx.async_eval([layer.state for layer in cache])

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Compute the head.

        Args:
            token_ids: int32 [B, L].
            hidden: [B, L, hidden].
            cache: The head's cache.
            positions: int32 [B, L].

        Returns:
            Hidden states [B, L, hidden] for `LanguageModel.logits`.
        """
        return self._head.states(self._embed(token_ids), hidden, cache, positions)


def _no_slots_of(slots: mx.array) -> mx.array:
    batch, heads, _, head_dim = slots.shape
    return mx.zeros((batch, heads, 0, head_dim), slots.dtype)
