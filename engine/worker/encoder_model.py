"""EncoderModel: the forward of an encoder over several texts, each as if it were alone."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.modernbert import Model as ModernBert

from engine.config import Pooling
from engine.worker.nomic_bert import Model as NomicBert
from engine.worker.pooling import PooledStates


class EncoderModel:
    """One of the encoders. Padding behind a text is masked, so that it has no effect.

    Args:
        module: The library's module, or one of the engine.
    """

    def __init__(self, module: Any):
        self._module = module
        self._is_modern, self._is_nomic = isinstance(module, ModernBert), isinstance(module, NomicBert)
        self._has_types = getattr(module.config, "type_vocab_size", 0) > 1

    @property
    def scores_pairs(self) -> bool:
        """Whether it has an output layer for classes."""
        return hasattr(self._module, "classifier")

    def hidden(self, texts: Sequence[np.ndarray], pair_starts: Sequence[int | None]) -> mx.array:
        """Return the hidden states [B, longest, hidden] after the last norm, lazy; those behind a text mean nothing.

        Args:
            texts: int32 [num_tokens] each.
            pair_starts: For each text the index of the first token of type 1, None if it has no second part.
        """
        lengths = np.array([len(text) for text in texts])
        longest = int(lengths.max())
        token_ids = mx.array(np.stack([np.pad(text, (0, longest - len(text))) for text in texts]))
        own = None if lengths.min() == longest else mx.arange(longest) < mx.array(lengths)[:, None]
        if self._is_modern:
            return self._modern(token_ids, own)
        starts = [longest if start is None else start for start in pair_starts]
        types = (mx.arange(longest) >= mx.array(starts)[:, None]).astype(mx.int32) if self._has_types else None
        mask = None if own is None else own[:, None, None]
        if self._is_nomic:
            return self._module(token_ids, types, lengths.tolist(), mask)
        return self._module.encoder(self._module.embeddings(token_ids, types), mask)

    def _modern(self, token_ids: mx.array, own: mx.array | None) -> mx.array:
        """Compute ModernBERT, most of whose layers see half of `local_attention` tokens on either side."""
        num_tokens, reach = token_ids.shape[1], self._module.local_attention // 2
        seen = near = None if own is None else own[:, None, None]
        if num_tokens > reach + 1:
            positions = mx.arange(num_tokens)
            near = mx.abs(positions[:, None] - positions) <= reach
            if seen is not None:
                near = (near & seen) | mx.eye(num_tokens, dtype=mx.bool_)  # padding has something to see
        hidden = self._module.embeddings(token_ids)
        for layer in self._module.layers:
            hidden = layer(hidden, seen, near)
        return self._module.final_norm(hidden)

    def score(self, hidden: mx.array) -> bytes | None:
        """Return the logit of a pair, computed in float32.

        Args:
            hidden: [num_tokens, hidden], all states of the pair.

        Returns:
            Little-endian float32 [1]; None if it is not finite.
        """
        module, states = self._module, hidden.astype(mx.float32)[None]
        if self._is_modern:
            first = states[:, 0] if module.config.classifier_pooling == "cls" else states.mean(axis=1)
            logit = module.classifier(module.head(first))
        elif hasattr(module, "pooler"):
            logit = module.classifier(module.pooler(states))
        else:
            logit = module.classifier(states)
        value = np.array(logit.astype(mx.float32), "<f4").reshape(1)
        return value.tobytes() if np.isfinite(value).all() else None

    def attend(self, num_tokens: int) -> mx.array:
        """Return the attention of the first layer over zeros of one text, lazy, for the measurement of its memory."""
        hidden = mx.zeros((1, num_tokens, self._module.config.hidden_size), self.dtype)
        if self._is_nomic:
            return self._module.layers[0].self_attn(hidden, self._module.angles([num_tokens], num_tokens), None)
        if not self._is_modern:
            return self._module.encoder.layer[0].attention.self(hidden)
        positions = mx.arange(num_tokens)
        near = mx.abs(positions[:, None] - positions) <= self._module.local_attention // 2
        return self._module.layers[min(1, len(self._module.layers) - 1)].attn(hidden, near, near)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of its hidden states."""
        module = self._module
        norm = module.final_norm if self._is_modern else module.embeddings.LayerNorm
        return norm.weight.dtype


def pooled(hidden: mx.array, pooling: Pooling) -> bytes | None:
    """Return the embedding of a text, see `PooledStates.vector`. hidden: [num_tokens, hidden], all of its states."""
    states = PooledStates(pooling)
    states.add(hidden[None])
    return states.vector()
