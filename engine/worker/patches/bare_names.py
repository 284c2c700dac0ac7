"""Loading of checkpoints whose tensors are named as in the decoder alone, without `model.` in front.

sentence-transformers saves a decoder without its output layer, so that `model.layers.0...` becomes `layers.0...`
(Qwen3-Embedding, E5-Mistral). mlx_vlm 0.7.10 renames them only in its embedding families, which take no cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

from mlx_vlm.utils import get_model_and_args

BARE = "embed_tokens.weight"
"""A tensor of every decoder."""


@contextmanager
def bare_names(model_config: dict[str, Any]) -> Iterator[None]:
    """Let the library's model of this configuration also load a decoder's tensors by their bare names."""
    model: Any = get_model_and_args(model_config)[0].Model
    if not hasattr(model, "sanitize"):
        yield
        return
    original = getattr_static(model, "sanitize")

    def sanitize(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        is_bare = BARE in weights
        renamed = {f"model.{name}": weight for name, weight in weights.items()} if is_bare else weights
        return original.__get__(self, model)(renamed)  # a method or a static method

    model.sanitize = sanitize
    try:
        yield
    finally:
        model.sanitize = original
