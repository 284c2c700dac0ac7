"""Keeps the host from running far ahead of the device while it computes a chunk of a prompt.

On CUDA MLX 0.32.4 hands whole chunks to the device before their first layer is computed, and the intermediate results
of all layers are allocated by then: those of 2,048 tokens of a 27B model in 4 bits took 6 to 38 GB on an H200, most of
them weights that are expanded for a product. How much it was depended on how fast the host was, so no measurement of a
start could say what a chunk needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from engine.worker import devices
from engine.worker.layer_outputs import layers_of

LAYERS = 4
"""Every so many layers the host waits for those that were enqueued as many before: twice as many are on their way."""

MIN_TOKENS = 32
"""Decode steps and the verification of drafts have fewer tokens per row; they never wait."""

_shares = False


@contextmanager
def of_several_prompts() -> Iterator[None]:
    """Let forwards wait that have MIN_TOKENS only in all of their rows."""
    global _shares
    _shares = True
    try:
        yield
    finally:
        _shares = False


class RunAhead:
    """Lets decoder layers wait for earlier ones in forwards of many tokens.

    Every LAYERS-th layer gets a class of its own, derived from its own; weights and names stay.

    Args:
        layers: The decoder layers in their order.
    """

    def __init__(self, layers: Sequence[Any]):
        self._computing: mx.array | None = None
        for layer in layers[LAYERS - 1 : -1 : LAYERS]:
            layer.__class__ = _waiting(type(layer), self.enqueue)
        layers[-1].__class__ = _waiting(type(layers[-1]), self.end)

    def enqueue(self, hidden: mx.array) -> None:
        """Begin to compute a layer's hidden states [B, L, hidden size], and wait for those LAYERS layers before."""
        if (hidden.shape[0] * hidden.shape[1] if _shares else hidden.shape[1]) < MIN_TOKENS:
            return
        mx.async_eval(hidden)
        if self._computing is not None:
            mx.eval(self._computing)
        self._computing = hidden

    def end(self, hidden: mx.array) -> None:
        """Forget the layer that the host would wait for: these hidden states are the last layer's."""
        self._computing = None


def limit(language_model: Any) -> None:
    """Let the decoder layers of the library's language model wait for earlier ones, on CUDA.

    A few families name their caches' places as layers; they are not limited.
    """
    layers = [layer for layer in layers_of(language_model) if callable(layer)]
    if devices.device_kind() == "cuda" and layers:
        RunAhead(layers)


def _waiting(kind: Any, note: Callable[[mx.array], None]) -> type:
    class Waiting(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            note(output[0] if isinstance(output, tuple) else output)
            return output

    Waiting.__name__ = kind.__name__
    return Waiting
