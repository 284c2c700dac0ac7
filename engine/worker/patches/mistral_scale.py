"""The query scale of Mistral 3 and 4 for rows at different positions.

Their attention scales queries by a function of the position, which mlx_vlm 0.7.10 computes for all rows from the
position of the first. Here it is computed from every row's own position; the library's wait for the device, to read the
first one, remains. It can be removed when the library does so itself, as it does in models/ministral3.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_vlm.models.mistral3 import language as mistral3
from mlx_vlm.models.mistral4 import language as mistral4

_library_scale = mistral4._get_llama_4_attn_scale
_library_calls = {model: model.__call__ for model in (mistral3.Ministral3, mistral4.Mistral4Model)}
_starts: list[mx.array] = []
"""int32 [B], each row's position, during a forward of a decode group; empty otherwise."""


def _scale(start: int, stop: int, beta: float, max_positions: int) -> mx.array:
    """Return the scale [L, 1], or [B, 1, L, 1] in a forward of a decode group."""
    if not _starts:
        return _library_scale(start, stop, beta, max_positions)
    positions = _starts[-1][:, None, None, None] + mx.arange(stop - start)[:, None]
    return 1 + beta * mx.log(1 + mx.floor(positions / max_positions))


def _calling(library: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def call(self: Any, inputs: mx.array, cache: Any = None, inputs_embeds: mx.array | None = None) -> mx.array:
        offset = cache[0].offset if cache is not None and cache[0] is not None else 0
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return library(self, inputs, cache, inputs_embeds)
        _starts.append(offset)
        try:
            return library(self, inputs, cache, inputs_embeds)
        finally:
            _starts.pop()

    return call


def install() -> None:
    """Replace the library's functions. May be called several times."""
    for module in (mistral3, mistral4):
        vars(module)["_get_llama_4_attn_scale"] = _scale
    for model, library in _library_calls.items():
        model.__call__ = _calling(library)
