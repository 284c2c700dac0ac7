"""Weights of a module: their names, dtype and quantization."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.config import EngineConfig
from engine.host_memory import HostMemory
from engine.worker import devices
from engine.worker.expanded_weights import Expansion, expand

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def weights_of(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Return all weights by name."""
    flat: Any = tree_flatten(module.parameters())
    return flat


def cast(module: nn.Module, dtype: mx.Dtype | None) -> None:
    """Cast floating weights, except those that the model's `cast_predicate` keeps, such as recurrent decays."""
    if dtype is None:
        return
    may_cast = getattr(module, "cast_predicate", None) or (lambda name: True)
    weights = [
        (name, w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) and may_cast(name) else w)
        for name, w in weights_of(module)
    ]
    module.update(tree_unflatten(weights))


def choose_dtype(dtype: str, model_config: dict[str, Any]) -> mx.Dtype | None:
    """Return the dtype to cast to; None to keep the checkpoint's, as for a quantized one on a GPU."""
    if dtype != "auto":
        return DTYPES[dtype]
    if not devices.on_gpu():
        return mx.float32
    quantized = "quantization" in model_config or "quantization_config" in model_config
    return None if quantized else mx.bfloat16


def main_dtype(module: nn.Module) -> str:
    """Return the floating dtype of most bytes, in which the model computes; packed integer weights do not count."""
    size: dict[str, int] = {}
    for _, w in weights_of(module):
        if not mx.issubdtype(w.dtype, mx.floating):
            continue
        name = str(w.dtype).removeprefix("mlx.core.")
        size[name] = size.get(name, 0) + w.nbytes
    return max(size, key=lambda name: size[name])


def expand_weights(config: EngineConfig, module: nn.Module, dtype: str) -> Expansion:
    """Expand the quantized weights of a module as configured; see expanded_weights.expand."""
    available_bytes = HostMemory(0).available()
    return expand(config.expand_quantized_weights, module, DTYPES[dtype], devices.on_gpu(), available_bytes)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module has quantized weights."""
    return any(name.endswith(".scales") for name, _ in weights_of(module))
