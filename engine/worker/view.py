"""The language model as the runner sees it: one forward, positions always explicit where the model has them."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from engine.worker.kv_cache import RowCache


class View:
    """Shares the module of the loaded model; holds no weights and no state of its own.

    Models with multimodal rope (`get_rope_index`) keep positions in module state unless they are given, which would
    mix up rows; they always get them here. Text ports take them from their cache, which is right for dense prompts.
    `capture_layer_ids=[]` asks for no layer's output, but keeps the library from copying the whole cache of a
    single-row batch on every token (mlx_vlm 0.7.10, models/qwen3_5/language.py).
    """

    def __init__(self, language_model: Any):
        self.lm = language_model
        self.explicit_positions = hasattr(language_model, "get_rope_index")

    def make_cache(self) -> RowCache:
        """An empty cache for one row, one entry per layer."""
        return make_prompt_cache(self.lm)

    def embed(self, token_ids: mx.array) -> mx.array:
        """[B, L] -> [B, L, hidden]."""
        return self.lm.model.embed_tokens(token_ids)

    def decode(self, token_ids: mx.array, cache: list, positions: np.ndarray) -> mx.array:
        """One token per row. token_ids [B], positions int32 [B] (logical). Returns logits [B, vocab]."""
        if not self.explicit_positions:
            return self.lm(token_ids[:, None], cache=cache).logits[:, -1]
        out = self.lm(token_ids[:, None], cache=cache, position_ids=mx.array(positions[:, None]), capture_layer_ids=[])
        return out.logits[:, -1]

    def extend(self, token_ids: mx.array, embeds: mx.array | None, cache: list, positions: np.ndarray) -> None:
        """Prompt tokens into the cache of one row, nothing else. token_ids [1, L], positions int32 [3, 1, L]."""
        self._prompt(token_ids, embeds, cache, positions)
        evaluate(cache)

    def extend_to_end(
        self, token_ids: mx.array, embeds: mx.array | None, cache: list, positions: np.ndarray
    ) -> mx.array:
        """The last prompt tokens; returns the logits [1, vocab] of the very last one (never of the others)."""
        if self.explicit_positions:
            hidden = self._prompt(token_ids, embeds, cache, positions)
            return self.lm.speculative_logits_from_hidden(hidden[:, -1:])[:, -1]
        if token_ids.shape[1] > 1:
            self.extend(token_ids[:, :-1], None, cache, positions)
        return self.lm(token_ids[:, -1:], cache=cache).logits[:, -1]

    def _prompt(self, token_ids: mx.array, embeds: mx.array | None, cache: list, positions: np.ndarray) -> mx.array:
        if not self.explicit_positions:
            assert embeds is None, "this model takes no embeddings"
            return self.lm(token_ids, cache=cache).logits  # lazy: only the cache is ever evaluated
        out = self.lm(
            token_ids,
            inputs_embeds=embeds,
            cache=cache,
            position_ids=mx.array(positions),
            skip_logits=True,
            return_hidden=True,
            capture_layer_ids=[],
        )
        return out.hidden_states[-1]


def evaluate(cache: list) -> None:
    """Computes all that the cache still owes; lazy graphs of its bookkeeping would grow without end otherwise."""
    mx.eval([layer.state for layer in cache])
