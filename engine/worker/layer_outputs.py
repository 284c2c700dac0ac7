"""Records outputs of the target's layers for heads that read more than its last hidden states."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class LayerOutputs:
    """Records the outputs of layers from now on.

    The layers get a class of their own, derived from theirs; weights and names stay.

    Args:
        language_model: The library's language model.
        layer_ids: Indices of the layers, in the order in which the head reads them.
    """

    def __init__(self, language_model: Any, layer_ids: Sequence[int]):
        self._outputs: dict[int, mx.array] = {}
        self._layer_ids = layer_ids
        layers = layers_of(language_model)
        for i in dict.fromkeys(layer_ids):
            layers[i].__class__ = _recorded(type(layers[i]), self._outputs, i)

    def take(self) -> mx.array:
        """Return the outputs of the last forward beside each other, [B, L, num_layers * hidden], and forget them.

        Several streams of hidden states [B, L, num_streams, hidden] are returned beside each other too.
        """
        outputs = [self._outputs[i].flatten(2) for i in self._layer_ids]
        self._outputs.clear()
        return mx.concatenate(outputs, axis=-1)


def layers_of(language_model: Any) -> Sequence[Any]:
    """Return the decoder layers of the library's language model."""
    return language_model.layers if hasattr(language_model, "layers") else language_model.model.layers


def _recorded(kind: Any, outputs: dict[int, mx.array], i: int) -> type:
    class Recorded(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            outputs[i] = output[0] if isinstance(output, tuple) else output
            return output

    Recorded.__name__ = kind.__name__
    return Recorded
