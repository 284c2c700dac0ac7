"""Records outputs of the target's modules for heads, beside what the model computes with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx


class ModuleOutputs:
    """Records the outputs of modules from now on.

    The modules get a class of their own, derived from theirs; weights and names stay.

    Args:
        modules: The modules by their names.
        order: Names in the order in which the head reads the outputs.
    """

    def __init__(self, modules: Mapping[int | str, Any], order: Sequence[int | str]):
        self._outputs: dict[int | str, mx.array] = {}
        self._order = order
        for name, module in modules.items():
            module.__class__ = _recorded(type(module), self._outputs, name)

    def take(self) -> mx.array:
        """Return the outputs of the last forward beside each other, [B, L, num_modules * hidden], and forget them.

        Several streams of hidden states [B, L, num_streams, hidden] are returned beside each other too.
        """
        outputs = [self._outputs[name].flatten(2) for name in self._order]
        self._outputs.clear()
        return mx.concatenate(outputs, axis=-1)


class LayerOutputs(ModuleOutputs):
    """Records the outputs of decoder layers.

    Args:
        language_model: The library's language model.
        layer_ids: Indices of the layers, in the order in which the head reads them.
    """

    def __init__(self, language_model: Any, layer_ids: Sequence[int]):
        layers = layers_of(language_model)
        super().__init__({i: layers[i] for i in layer_ids}, layer_ids)


class LastStates(ModuleOutputs):
    """Records the hidden states after the last norm, of a model that makes its logits of them by itself.

    Logits that are made apart lack what such a model does to its own: a soft cap, or the images of a prompt.

    Args:
        language_model: The library's language model.
    """

    def __init__(self, language_model: Any):
        super().__init__({"norm": language_model.model.norm}, ["norm"])


def layers_of(language_model: Any) -> Sequence[Any]:
    """Return the decoder layers of the library's language model."""
    return language_model.layers if hasattr(language_model, "layers") else language_model.model.layers


def _recorded(kind: Any, outputs: dict[int | str, mx.array], name: int | str) -> type:
    class Recorded(kind):
        recorded: type

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            outputs[name] = output[0] if isinstance(output, tuple) else output
            return output

    Recorded.__name__, Recorded.recorded = kind.__name__, kind
    return Recorded


def class_of(layer: Any) -> type:
    """Return the library's class of a decoder layer, whose outputs may be recorded."""
    kind = type(layer)
    while (recorded := kind.__dict__.get("recorded")) is not None:
        kind = recorded
    return kind
