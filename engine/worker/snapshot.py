"""Snapshots: the state after a prefix, copied from one row's caches and into another's; immutable in between.

Attention layers append: a snapshot holds the keys and values of its own KV segment, and its ancestors those before it,
so that the memory of a growing conversation is linear in its length. The entries of a pool are such keys, in fewer
slots than there are tokens. Recurrent layers have one complete state, and so have layers with a sliding window: the
keys and values of its tokens. Arrays of a snapshot are never written: the KV segment is a copy, is copied again on
restore, and recurrent layers replace their states instead of writing into them.

A KV segment can be lent to the row that continues its snapshot: its keys and values are then only in the row's cache,
and are copied back when the row is removed. The slots of a row's first tokens never change, so they can be copied at
any time.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.core.runner import SEGMENT_ARRAYS
from engine.worker.kv_cache import SequenceCache
from engine.worker.layer_kinds import appends, kind_of

SMALL_BYTES = 2**22
"""Smaller arrays are copied: the 16 KiB that a slice may keep alive are less than half a percent of larger ones."""

KeysValues = tuple[mx.array, mx.array]


@dataclass(slots=True, eq=False)
class DeviceSegment:
    """A KV segment on the device. Implements core.prefix_cache.node.KVSegment."""

    parent: "DeviceSegment | None"
    """The segment before it; None for the first."""
    layers: list[KeysValues | None]
    """Per attention layer keys and values [1, heads, n, head_dim or words]; None while they are in a row's cache. Those
    of the model that drafts are never lent by a decoding row, because its cache may lag behind."""
    ends: tuple[int, ...]
    """Per attention layer the slots of a row up to the end of this segment."""

    @classmethod
    def lent(cls, parent: "DeviceSegment | None", ends: tuple[int, ...]) -> "DeviceSegment":
        """Return a segment whose keys and values are in a row's cache."""
        return cls(parent, [None] * len(ends), ends)

    @property
    def is_lent(self) -> bool:
        """Whether any of its keys and values are in a row's cache, or were lost with it."""
        return any(layer is None for layer in self.layers)

    @property
    def starts(self) -> tuple[int, ...]:
        return self.parent.ends if self.parent is not None else (0,) * len(self.ends)

    @property
    def keys_values(self) -> list[KeysValues]:
        """Keys and values of all attention layers. Raises ValueError while they are lent."""
        found = [layer for layer in self.layers if layer is not None]
        if len(found) < len(self.layers):
            raise ValueError(f"the keys and values up to slot {max(self.ends)} are lent to a row")
        return found

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in filter(None, self.layers))

    def chain(self) -> list["DeviceSegment"]:
        """Return all segments from the first token on, this one last."""
        chain: list[DeviceSegment] = []
        at: DeviceSegment | None = self
        while at is not None:
            chain.append(at)
            at = at.parent
        return chain[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """A snapshot on the device. Implements core.prefix_cache.node.Snapshot."""

    num_tokens: int  # Tokens before its boundary.
    segment: DeviceSegment  # Its own KV segment.
    states: tuple[tuple[mx.array, ...], ...]  # Slots of each recurrent layer; keys and values of each window's tokens.
    hidden: mx.array | None  # [1, 1, hidden], the last one, which the head has not read yet; None where none waits.
    windows: tuple[int, ...]  # Per state the tokens of the layer's window; 0 for a recurrent layer.
    ratios: tuple[int, ...]  # Per attention layer the tokens of a slot: more than one for a pool.
    kv_lags: tuple[int, ...]  # Per attention layer the tokens that it lacks: a head has read one pair less.
    state_lags: tuple[int, ...]  # Per state likewise.

    @property
    def segment_bytes(self) -> int:
        return self.segment.num_bytes

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for state in self.states for array in state) + (
            self.hidden.nbytes if self.hidden is not None else 0
        )


def prefix_unsupported_reason(cache: SequenceCache) -> str | None:
    """Return why the state after fewer tokens than a row has cannot be read from such layers, None if it can."""
    for i, layer in enumerate(cache):
        if not appends(layer):
            return f"layer {i} ({type(layer).__name__}) has only its newest state"
    return None


def prefix(cache: SequenceCache, num_tokens: int) -> SequenceCache:
    """Return a row's attention layers as they were after its first `num_tokens` tokens, sharing their arrays."""
    layers = [copy(layer) for layer in cache]
    for layer in layers:
        assert appends(layer)
        layer.offset = num_tokens
    return layers


def is_finite(cache: SequenceCache) -> bool:
    """Return whether a row's state is free of NaN and inf: recurrent states, and the newest keys and values.

    A value that is not finite anywhere in a prompt reaches the newest position of a deeper layer. Waits for the device.
    """
    arrays = [array for layer in cache for array in kind_of(layer).newest(layer)]
    return bool(mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in arrays])).item())


def take(
    cache: SequenceCache,
    hidden: mx.array | None,
    num_tokens: int,
    parent: DeviceSegment | None,
    num_lent: int = 0,
) -> StateSnapshot:
    """Copy one row's caches (the target's layers, then the head's), evaluated.

    Args:
        cache: Caches of a row of `num_tokens` tokens.
        hidden: See StateSnapshot.
        num_tokens: Tokens that the row's state includes.
        parent: The KV segment of the row's first tokens; None without one.
        num_lent: Leave the keys and values of this many of the first attention layers in the row's cache.
    """
    attention, others = _by_kind(cache)
    segment = DeviceSegment.lent(parent, tuple(layer.offset for layer in attention))
    for i, layer in enumerate(attention[num_lent:], num_lent):
        segment.layers[i] = _between(layer.keys, layer.values, segment.starts[i], segment.ends[i])
    mx.eval(list(filter(None, segment.layers)))
    states: Any = tuple(tuple(map(_own, kind_of(layer).state(layer))) for layer in others)
    hidden = _own(hidden) if hidden is not None else None
    mx.eval(states, [] if hidden is None else hidden)
    lags = list[int]()
    for layer in cache:
        lags.append(kind_of(layer).num_lacking(layer, num_tokens, lags[-1] if lags else 0))
    kv_lags = tuple(lag for layer, lag in zip(cache, lags, strict=True) if appends(layer))
    state_lags = tuple(lag for layer, lag in zip(cache, lags, strict=True) if not appends(layer))
    windows = tuple(kind_of(layer).window(layer) for layer in others)
    ratios = tuple(kind_of(layer).tokens_per_slot(layer) for layer in attention)
    return StateSnapshot(num_tokens, segment, states, hidden, windows, ratios, kv_lags, state_lags)


def _by_kind(cache: SequenceCache) -> tuple[SequenceCache, SequenceCache]:
    """Return the layers that append keys and values, and those that have a complete state."""
    return [layer for layer in cache if appends(layer)], [layer for layer in cache if not appends(layer)]


class LentSegments:
    """KV segments lent to one row, to be copied back one attention layer after the other.

    Args:
        segments: The segments, in order.
        index: Which row of the layers' arrays.
    """

    def __init__(self, segments: Sequence[DeviceSegment], index: int = 0):
        self._segments = segments
        self._index = index
        self._num_layers = 0

    def fill(self, layer: Any) -> None:
        """Copy the keys and values of the next attention layer, evaluated. Other layers are skipped."""
        if not appends(layer):
            return
        i, row = self._num_layers, slice(self._index, self._index + 1)
        self._num_layers += 1
        lent = [segment for segment in self._segments if segment.layers[i] is None]
        for segment in lent:
            segment.layers[i] = _between(layer.keys[row], layer.values[row], segment.starts[i], segment.ends[i])
        mx.eval([segment.layers[i] for segment in lent])


def fill(segments: Sequence[DeviceSegment], layers: list[Any], index: int = 0, release: bool = False) -> None:
    """Copy lent keys and values out of a row's cache. On an error all segments stay as they were.

    Args:
        segments: Segments lent to the row, in order.
        layers: The caches of all layers, which may hold several rows.
        index: Which of these rows.
        release: Whether to free each layer once it is copied.
    """
    lent, before = LentSegments(segments, index), [list(segment.layers) for segment in segments]
    try:
        for i, layer in enumerate(layers):
            lent.fill(layer)
            if release:
                layers[i] = None
    except Exception:
        for segment, own in zip(segments, before, strict=True):
            segment.layers[:] = own
        raise


def _between(keys: Any, values: Any, start: int, end: int) -> KeysValues:
    return _copied(keys, start, end), _copied(values, start, end)


def _copied(slots: Any, start: int, end: int) -> mx.array:
    return _own(mx.contiguous(slots[..., start:end, :]))


def _own(array: Any) -> mx.array:
    """Copy a small array into a buffer of its own size: a slice may keep up to 16 KiB more alive."""
    return array * 1 if array.nbytes < SMALL_BYTES else array


def restore(snapshot: StateSnapshot, cache: SequenceCache, num_slots: int, lend: Iterable[DeviceSegment] = ()) -> None:
    """Copy a snapshot into the empty caches of a row, evaluated.

    Args:
        snapshot: The snapshot.
        cache: The row's caches.
        num_slots: Tokens to allocate slots for.
        lend: Segments of the snapshot whose keys and values move into the row's cache, layer by layer. They are lost if
            this raises.
    """
    chain, lent = [segment.keys_values for segment in snapshot.segment.chain()], set(lend)
    attention, others = _by_kind(cache)
    for i, (layer, end) in enumerate(zip(attention, snapshot.segment.ends, strict=True)):
        parts, slots = [layers.pop(0) for layers in chain], kind_of(layer).num_slots(layer, num_slots)
        layer.keys = _joined([keys for keys, _ in parts], slots - end)
        layer.values = _joined([values for _, values in parts], slots - end)
        layer.offset = end
        del parts
        if lent:
            mx.eval(layer.keys, layer.values)
            for segment in lent:
                segment.layers[i] = None
    for layer, state, lag in zip(others, snapshot.states, snapshot.state_lags, strict=True):
        kind_of(layer).set_state(layer, state, snapshot.num_tokens - lag)
    mx.eval([layer.state for layer in cache])


def _joined(parts: Sequence[mx.array], missing: int) -> mx.array:
    first = parts[0]
    empty = mx.zeros((*first.shape[:2], missing, first.shape[3]), first.dtype)
    return mx.concatenate([*parts, empty], axis=2)


def export(snapshot: StateSnapshot) -> dict[str, np.ndarray]:
    """Return a snapshot's arrays in host memory, without a copy where the device shares it; see `import_arrays`."""
    arrays: dict[str, mx.array] = {}
    for i, (keys, values) in enumerate(snapshot.segment.keys_values):
        arrays |= {f"{SEGMENT_ARRAYS}{i}.keys": keys, f"{SEGMENT_ARRAYS}{i}.values": values}
    for i, state in enumerate(snapshot.states):
        arrays |= {f"recurrent.{i}.{j}": array for j, array in enumerate(state)}
    if snapshot.hidden is not None:
        arrays["hidden"] = snapshot.hidden
    return {name: _to_host(array) for name, array in arrays.items()}


def import_arrays(
    arrays: dict[str, np.ndarray],
    like: StateSnapshot,
    num_tokens: int,
    parent: DeviceSegment | None,
    with_state: bool = True,
) -> Iterator[StateSnapshot | None]:
    """Copy exported arrays back to the device; see ModelRunner.import_snapshot.

    Args:
        arrays: What `export` returned.
        like: Any snapshot of the same model, for shapes and dtypes.
        num_tokens: Tokens before the snapshot's boundary.
        parent: The KV segment before its own; None without one.
        with_state: Whether to import recurrent states.
    """
    reader = _Reader(arrays)
    starts = parent.ends if parent is not None else (0,) * len(like.segment.ends)
    ends = tuple((num_tokens - lag) // ratio for lag, ratio in zip(like.kv_lags, like.ratios, strict=True))
    segment = DeviceSegment.lent(parent, ends)
    for i, ((keys, values), start, end) in enumerate(zip(like.segment.keys_values, starts, ends, strict=True)):
        segment.layers[i] = (
            reader.take(f"{SEGMENT_ARRAYS}{i}.keys", keys, length=end - start),
            reader.take(f"{SEGMENT_ARRAYS}{i}.values", values, length=end - start),
        )
        mx.eval(segment.layers[i])
        yield None
    states, hidden = reader.take_state(like, num_tokens) if with_state else ((), None)
    reader.check_all_taken()
    yield StateSnapshot(num_tokens, segment, states, hidden, like.windows, like.ratios, like.kv_lags, like.state_lags)


class _Reader:
    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = arrays

    def take_state(
        self, like: StateSnapshot, num_tokens: int
    ) -> tuple[tuple[tuple[mx.array, ...], ...], mx.array | None]:
        """Return `states` and `hidden` of a StateSnapshot of `num_tokens` tokens, evaluated."""
        states = tuple(
            tuple(
                self.take(f"recurrent.{i}.{j}", slot, min(num_tokens - lag, window) if window else None)
                for j, slot in enumerate(state)
            )
            for i, (state, window, lag) in enumerate(zip(like.states, like.windows, like.state_lags, strict=True))
        )
        hidden = self.take("hidden", like.hidden) if like.hidden is not None else None
        mx.eval(states, [] if hidden is None else hidden)
        return states, hidden

    def take(self, name: str, like: mx.array, length: int | None = None) -> mx.array:
        """Return an array on the device. length: of axis 2, if it differs from `like`."""
        found = self._arrays.pop(name, None)
        shape = like.shape if length is None else (*like.shape[:2], length, *like.shape[3:])
        dtype = np.dtype(np.uint16) if like.dtype == mx.bfloat16 else np.array(mx.zeros(0, like.dtype)).dtype
        if found is None or found.shape != shape or found.dtype != dtype:
            there = "nothing" if found is None else f"{found.dtype} {found.shape}"
            raise ValueError(f"{name}: expected {dtype} {shape}, found {there}")
        array = mx.array(found)
        return mx.view(array, mx.bfloat16) if like.dtype == mx.bfloat16 else array

    def check_all_taken(self) -> None:
        if self._arrays:
            raise ValueError(f"the snapshot has arrays that the model does not have: {', '.join(sorted(self._arrays))}")


def _to_host(array: mx.array) -> np.ndarray:
    if array.dtype == mx.bfloat16:  # numpy has none
        array = mx.view(array, mx.uint16)
    return np.array(array, copy=False)
