"""Masks and windows of PaliGemma's language models.

mlx_vlm 0.7.10 (models/paligemma/language.py) gives the layers no mask unless the caller passes one, so the tokens of a
draft would see those after them, and lets the layers of Gemma 2 with a window see all tokens. Here each layer asks its
cache, as those of other families do; the caches of a prompt let its tokens see each other (worker/image_attention.py).
The patch can be removed when the library masks answers and has the windows.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.cache import KVCache, RotatingKVCache
from mlx_vlm.models.paligemma.language import GemmaModel, LanguageModel

WINDOW = "sliding_attention"

_library = GemmaModel.__call__


def _kinds(config: Any, num_layers: int) -> list[str]:
    """Return the kind of each layer; those of Gemma 1 have no windows."""
    return config.layer_types or ["full_attention"] * num_layers


def _states(
    self: Any, inputs: mx.array, inputs_embeds: mx.array | None = None, mask: mx.array | None = None, cache: Any = None
) -> mx.array:
    """Return hidden states [B, L, hidden]. mask: of all layers, if it is given."""
    hidden = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
    hidden = hidden * mx.array(self.config.hidden_size**0.5, hidden.dtype)
    masks: dict[str, Any] = {} if mask is None else dict.fromkeys(("full_attention", WINDOW), mask)
    kinds = _kinds(self.config, len(self.layers))
    for kind, layer, own in zip(kinds, self.layers, cache or [None] * len(kinds), strict=True):
        if kind not in masks:
            window = self.config.sliding_window if kind == WINDOW else None
            found: Any = create_attention_mask(hidden, own, window_size=window, return_array=True)
            masks[kind] = found if found is None or found.ndim == 4 else found[None, None]  # the library guesses axes
        hidden = layer(hidden, masks[kind], own)
    return self.norm(hidden)


def _make_cache(self: Any) -> list[Any]:
    """Return the empty caches of the layers."""
    kinds = _kinds(self.config, len(self.layers))
    return [RotatingKVCache(self.config.sliding_window) if kind == WINDOW else KVCache() for kind in kinds]


def install() -> None:
    """Replace the library's methods. May be called several times."""
    GemmaModel.__call__ = _states
    LanguageModel.make_cache = _make_cache  # type: ignore[attr-defined]
