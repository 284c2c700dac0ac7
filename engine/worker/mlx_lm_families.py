"""Families that only mlx_lm implements, as mlx_vlm loads its own.

mlx_vlm 0.7.10 looks for a family among its own modules alone. Those of mlx_lm 0.32.2 take the same caches, but have
other classes of them, return logits without a wrapper, and have no part `language_model`. A family can be removed from
FAMILIES when mlx_vlm has a module of its name.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as lm_cache
from mlx_vlm.models import cache as vlm_cache
from mlx_vlm.models.base import LanguageModelOutput

FAMILIES = ("bailing_hybrid", "bailing_moe_v3", "gptj", "nanbeige", "olmo_hybrid", "talkie")
PREFIX = "language_model."


def register(model_type: str) -> None:
    """Let mlx_vlm find a family of FAMILIES; other names are ignored. May be called several times."""
    name = f"mlx_vlm.models.{model_type}"
    if model_type in FAMILIES and name not in sys.modules:
        sys.modules[name] = _adapted(name, import_module(f"mlx_lm.models.{model_type}"))


def _adapted(name: str, library: Any) -> ModuleType:
    """Return a module with the classes that mlx_vlm looks for."""

    class LanguageModel(library.Model):
        def __init__(self, args: Any):
            library.Model.__init__(self, args)
            self.args = args

        def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> LanguageModelOutput:
            return LanguageModelOutput(logits=library.Model.__call__(self, inputs, cache=cache))

        def make_cache(self) -> list[Any]:
            made: Any = _WithLayers(self, library.Model)
            return [_cache_of(layer) for layer in lm_cache.make_prompt_cache(made)]

    class Model(nn.Module):
        def __init__(self, config: Any):
            super().__init__()
            self.config = config
            self.language_model = LanguageModel(config)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
            if hasattr(library.Model, "sanitize"):
                weights = self.language_model.sanitize(weights)
            return {PREFIX + name: weight for name, weight in weights.items()}

    module: Any = ModuleType(name)
    module.Model, module.ModelConfig = Model, library.ModelArgs
    return module


class _WithLayers:
    """Stands for a model where mlx_lm makes its caches: has its layers, or its class's own way to make them."""

    def __init__(self, language_model: Any, library_class: Any):
        self.layers = language_model.layers
        if hasattr(library_class, "make_cache"):
            self.make_cache = lambda: library_class.make_cache(language_model)


def _cache_of(layer: Any) -> Any:
    """Return an empty cache of mlx_vlm of the same kind as one of mlx_lm; one of another kind as it is."""
    kind: Any = type(layer)
    if kind is lm_cache.KVCache:
        return vlm_cache.KVCache()
    if kind is lm_cache.RotatingKVCache:
        return vlm_cache.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    if kind is lm_cache.ArraysCache:
        return vlm_cache.ArraysCache(len(layer.cache))
    if kind is lm_cache.CacheList:
        return vlm_cache.CacheList(*map(_cache_of, layer.caches))
    return layer
