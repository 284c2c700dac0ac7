"""Molmo2's embedding as two lookups.

It has two tables, of the vocabulary and of the tokens around images. mlx_vlm 0.7.10 concatenates both at every call,
which copies them in each decode step. Neither table is ever quantized: the module has no
`to_quantized`. The patch can be removed when the library does not copy them.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.molmo2.language import Molmo2Embedding

library_call = Molmo2Embedding.__call__


def _call(self: Any, x: mx.array) -> mx.array:
    known, further = len(self.embedding), len(self.new_embedding)
    if not further:
        return self.embedding[x]
    looked_up = self.embedding[mx.minimum(x, known - 1)]
    return mx.where((x < known)[..., None], looked_up, self.new_embedding[mx.maximum(x, known) - known])


def install() -> None:
    """Replace the library's method. May be called several times."""
    Molmo2Embedding.__call__ = _call
