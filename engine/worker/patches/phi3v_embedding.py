"""Phi-3-vision's embedding of texts, without waiting for the tokens.

mlx_vlm 0.7.10 reads the tokens of every forward back, to find the negative ones of images, also where there is no
image: each decode step would wait for the last one, and no step could be compiled. The engine gives embeddings to
prompts with images. It can be removed when the library reads tokens only where there are images.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.phi3_v.phi3_v import Model

library_embeddings: Any = Model.get_input_embeddings


def _embeddings(self: Any, inputs: mx.array, pixel_values: mx.array | None = None, **kwargs: Any) -> Any:
    if pixel_values is not None:
        return library_embeddings(self, inputs, pixel_values, **kwargs)
    return InputEmbeddingsFeatures(inputs_embeds=self.model.embed_tokens(inputs))


def install() -> None:
    """Replace the library's method. May be called several times."""
    model: Any = Model
    model.get_input_embeddings = _embeddings
