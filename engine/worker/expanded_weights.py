"""Expands quantized weights to the dtype in which the model computes, where that is faster: on a CPU.

MLX's CPU backend takes about forty times as long for a product with quantized weights as for one with floats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_vlm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.config import ExpandQuantizedWeights
from engine.errors import EngineFailed

ROOM = 2
"""Times the expanded size that must be available for `auto`: the rest is for requests and other processes."""

EXPANDED: dict[type[nn.Module], Callable[[bool], nn.Module]] = {
    nn.QuantizedLinear: lambda has_bias: nn.Linear(1, 1, bias=has_bias),
    nn.QuantizedEmbedding: lambda has_bias: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda has_bias: SwitchLinear(1, 1, 1, bias=has_bias),
    QuantizedMultiLinear: lambda has_bias: MultiLinear(1, 1, 1),
}
"""Per kind of quantized module how to make the one that takes its place, whose arrays are set afterwards."""


@dataclass(frozen=True)
class Expansion:
    """What was done with the quantized weights of a model."""

    num_expanded: int
    """Modules whose weights were expanded."""
    text: str
    """For the log and the status page: what was done, with bytes, or why nothing was."""


def expand(
    choice: ExpandQuantizedWeights, module: nn.Module, dtype: mx.Dtype, on_gpu: bool, available_bytes: int
) -> Expansion:
    """Expand the quantized weights of a module lazily, if the choice, the device and the memory say so.

    Args:
        choice: See EngineConfig.expand_quantized_weights.
        module: The model, or its head; its weights need not be read.
        dtype: In which it computes.
        on_gpu: Whether it computes on a GPU.
        available_bytes: Memory that can be allocated.

    Raises:
        EngineFailed: The choice is `on`, and there are no quantized weights.
    """
    quantized = list(_quantized(module))
    if not quantized and choice == "on":
        raise EngineFailed("expand_quantized_weights is on, but the model has no quantized weights; use auto or off")
    if not quantized:
        return Expansion(0, "no quantized weights")
    stored_bytes = sum(_num_bytes(one) for _, one in quantized)
    expanded_bytes = sum(_expanded_bytes(one, dtype) for _, one in quantized)
    if (reason := _reason_to_keep(choice, on_gpu, expanded_bytes, available_bytes)) is not None:
        return Expansion(0, f"{len(quantized)} modules of {stored_bytes} bytes stay quantized: {reason}")
    known = [(name, one) for name, one in quantized if type(one) in EXPANDED]
    module.update_modules(tree_unflatten([(name, _expanded(one, dtype)) for name, one in known]))
    others = sorted({type(one).__name__ for _, one in quantized if type(one) not in EXPANDED})
    left = f"; {', '.join(others)} cannot be expanded and stay quantized" if others else ""
    text = f"{len(known)} quantized modules expanded, from {stored_bytes} to {expanded_bytes} bytes{left}"
    return Expansion(len(known), text)


def _reason_to_keep(
    choice: ExpandQuantizedWeights, on_gpu: bool, expanded_bytes: int, available_bytes: int
) -> str | None:
    if choice == "off":
        return "expand_quantized_weights is off"
    if choice == "on":
        return None
    if on_gpu:
        return "the device is a GPU"
    if ROOM * expanded_bytes > available_bytes:
        return (
            f"expanded they would take {expanded_bytes} bytes, and of the machine's memory {available_bytes} bytes are "
            f"available, less than {ROOM} times as many; products with quantized weights are slow on a CPU"
        )
    return None


def _quantized(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules with quantized weights, by name."""
    for name, one in module.named_modules():
        if all(hasattr(one, field) for field in ("weight", "scales", "bits", "group_size")):
            yield name, one


def _num_bytes(quantized: Any) -> int:
    arrays = [quantized.weight, quantized.scales, quantized.get("biases")]
    return sum(array.nbytes for array in arrays if array is not None)


def _expanded_bytes(quantized: Any, dtype: mx.Dtype) -> int:
    if type(quantized) not in EXPANDED:
        return _num_bytes(quantized)
    return quantized.weight.size * 32 // quantized.bits * dtype.size


def _expanded(quantized: Any, dtype: mx.Dtype) -> nn.Module:
    has_bias = "bias" in quantized
    module: Any = EXPANDED[type(quantized)](has_bias)
    module.weight = mx.dequantize(
        quantized.weight,
        quantized.scales,
        quantized.get("biases"),
        quantized.group_size,
        quantized.bits,
        quantized.mode,
        dtype=dtype,
    )
    if has_bias:
        module.bias = quantized.bias
    return module
