"""The decode forward as a compiled graph: built once per shape and replayed without Python overhead.

A step of a 32-layer model has two thousand operations, and on a fast GPU building and encoding them takes longer than
computing them. A shape is the number of rows, of new tokens, and of slots, which grow in multiples of
kv_cache.SLOTS_STEP.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from engine.worker.kv_cache import BatchCache

MAX_SHAPES = 64  # cached graphs, of about 1 MB each

Forward = Callable[[mx.array, list[Any], mx.array], tuple[mx.array, mx.array | None]]
"""(token_ids [B, L], layers, positions [B, L]) -> logits, hidden states: see LanguageModel.decode."""


class CompiledForward:
    """Compiles `forward` for each shape; the least recently used graphs are dropped first."""

    def __init__(self, forward: Forward):
        self._forward = forward
        self._graphs: OrderedDict[tuple[int, ...], Callable[..., Any]] = OrderedDict()

    def __call__(
        self, token_ids: mx.array, cache: BatchCache, start: mx.array, extent: int, positions: mx.array, record: bool
    ) -> tuple[mx.array, mx.array | None]:
        num_slots = cache.reserve(extent)
        state = cache.state
        logits, hidden, state, recorded = self._graph(cache, num_slots, token_ids.shape, record)(
            token_ids, positions, start, *state
        )
        cache.at(start, num_slots, record=record)
        cache.load(state, recorded)
        return logits, hidden

    def _graph(self, cache: BatchCache, num_slots: int, shape: tuple[int, ...], record: bool) -> Callable[..., Any]:
        key = (*shape, num_slots, record)
        graph = self._graphs.pop(key, None) or self._compile(cache, num_slots, record)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_SHAPES:
            self._graphs.popitem(last=False)
        return graph

    def _compile(self, like: BatchCache, num_slots: int, record: bool) -> Callable[..., Any]:
        empty = like.with_arrays(
            [mx.zeros(0)] * len(like.state)
        )  # structure only: the graph must not keep arrays alive

        def run(token_ids: mx.array, positions: mx.array, start: mx.array, *state: mx.array) -> Any:
            cache = empty.with_arrays(state)
            layers = cache.at(start, num_slots, record=record)
            logits, hidden = self._forward(token_ids, layers, positions)
            return logits, hidden, cache.state, cache.recorded

        return mx.compile(run)
