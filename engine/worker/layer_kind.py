"""LayerKind: a kind of layer, and what the engine asks it, from the library's empty cache to the state in a snapshot.

A new kind is a subclass in a file of its own, with an entry in `layer_kinds.KINDS`. Beside it the file has the layer of
a decode group, the layer of a burst, and the cache of one row if the library's does not do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from engine.processing.reference_config import Reach
from engine.processing.vision_family import AttentionKind
from engine.worker.batch_layer import BatchLayer
from engine.worker.burst_layer import BurstForward, BurstLayer
from engine.worker.quantized_kv import KVFormat


class LayerKind:
    """A kind of layer whose caches have one complete state, which a snapshot copies.

    Layers with `batch.appends` have keys and values in slots that never change instead, which snapshots hold in KV
    segments.
    """

    library: tuple[type, ...] = ()
    """The library's classes of empty caches, exact types: subclasses store their state differently."""
    rows: tuple[type, ...] = ()
    """Classes of one row's cache, likewise; none where a row has caches of other kinds in the library's place."""
    batch: type[BatchLayer]
    """Class of the layer of a decode group."""
    burst: type[BurstLayer]
    """Class of the layer of a burst."""
    is_recurrent = False
    """Whether the state is one for all tokens, so that rejected drafts are taken back only by what was recorded."""
    attention: AttentionKind | None = None
    """Which layers of a vision family it is, whose image tokens may see each other; None for none."""

    def unserved_reason(self, cache: Any) -> str | None:
        """Return what an empty cache of the library has that is not served, None if it is."""
        return None

    def reach(self, cache: Any) -> Reach:
        """Return the tokens that a layer with this empty cache of the library attends to."""
        return None

    def row_caches(self, cache: Any) -> tuple[Any, ...]:
        """Return a row's empty caches in the place of this empty cache of the library."""
        return (cache,)

    def as_taken(self, cache: Any, caches: Iterator[Any]) -> Any:
        """Return the object that a layer of the model receives instead of the library's cache.

        Args:
            cache: The library's cache.
            caches: The objects that stand for `row_caches`: a row's caches, or layers of a group or burst.
        """
        return next(caches)

    def batch_layer(self, cache: Any, cursor: Any) -> Any:
        """Return the layer of a decode group with one row, whose cache this is. cursor: Where the rows write."""
        return self.batch.of(cache, cursor)

    def burst_layer(self, caches: Sequence[Any], forward: BurstForward) -> Any:
        """Return the layer of a burst of prompts with these caches."""
        return self.burst(caches, forward)

    def kv_format(self, cache: Any) -> KVFormat | None:
        """Return how a row's cache packs its keys and values; None if they are stored as computed."""
        return None

    def window(self, cache: Any) -> int:
        """Return how many tokens of the row a state has, at most; 0 if it is one for all tokens."""
        return 0

    def tokens_per_slot(self, cache: Any) -> int:
        """Return how many tokens of the row share a slot."""
        return 1

    def num_slots(self, cache: Any, num_tokens: int) -> int:
        """Return the slots to allocate for tokens; only layers that append have them."""
        raise NotImplementedError

    def num_lacking(self, cache: Any, num_tokens: int, inputs_lack: int) -> int:
        """Return how many of a row's `num_tokens` tokens the cache lacks. A head's has read one pair less.

        Args:
            cache: The cache.
            num_tokens: Tokens of the row.
            inputs_lack: How many the cache before it lacks, from which a pool is made.
        """
        return 0

    def newest(self, cache: Any) -> list[mx.array]:
        """Return the arrays in which NaN or inf would show, wherever in the row it came from."""
        return list(self.state(cache))

    def state(self, cache: Any) -> tuple[mx.array, ...]:
        """Return the complete state, which may share the cache's arrays; layers that append have none."""
        raise NotImplementedError

    def set_state(self, cache: Any, state: tuple[mx.array, ...], num_tokens: int) -> None:
        """Set the state of an empty cache. num_tokens: tokens that the state includes."""
        raise NotImplementedError
