"""The scale of embeddings of Granite and MiniCPM, for prompts and answers given as token ids.

mlx_vlm 0.7.10 multiplies input embeddings by `embedding_multiplier` or `scale_emb`, but not those that it looks up for
token ids: the engine's forwards, and those of the library's own generation after the prompt, are of another model. It
can be removed when the library scales both, as mlx_lm does.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_vlm.models.granite.language import GraniteModel
from mlx_vlm.models.granitemoe.language import GraniteMoEModel
from mlx_vlm.models.minicpm.language import MiniCPMModel
from mlx_vlm.models.minicpm3.language import MiniCPM3Model

_library_calls: dict[Any, Callable[..., mx.array]] = {
    model: model.__call__ for model in (GraniteModel, GraniteMoEModel, MiniCPMModel, MiniCPM3Model)
}


def _calling(library: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def call(self: Any, inputs: mx.array, *args: Any, inputs_embeds: mx.array | None = None, **kwargs: Any) -> mx.array:
        embeds = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        return library(self, inputs, *args, inputs_embeds=embeds, **kwargs)

    return call


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for model, library in _library_calls.items():
        model.__call__ = _calling(library)
