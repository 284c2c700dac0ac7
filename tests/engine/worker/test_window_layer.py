"""A ring of slots shows attention the same keys and values as all tokens with the mask of a window or of chunks."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import RotatingKVCache

from engine.worker.chunk_layer import ChunkedCache
from engine.worker.kv_cache import BatchCache
from engine.worker.window_layer import RING_MARGIN, BatchWindowLayer, last_tokens, ring_slots

WINDOW, HEADS, DIM = 8, 2, 4
KINDS = [RotatingKVCache, ChunkedCache]


def key_of(row: int, position: int) -> np.ndarray:
    return np.full((HEADS, DIM), 1000.0 * row + position, np.float32)


def tokens(row: int, start: int, end: int) -> mx.array:
    """Keys [1, heads, n, head_dim] that tell row and position."""
    return mx.array(np.stack([key_of(row, position) for position in range(start, end)], axis=1)[None])


def prefilled(
    row: int, chunks: list[int], window: int = WINDOW, kind: type[RotatingKVCache] = RotatingKVCache
) -> RotatingKVCache:
    cache, at = kind(max_size=window), 0
    for size in chunks:
        keys = tokens(row, at, at + size)
        cache.update_and_fetch(keys, -keys)
        at += size
    return cache


def seen(layer: BatchWindowLayer, group: BatchCache, lengths: list[int], num_new: int) -> list[list[list[int]]]:
    """Write the rows' next tokens; return per row and new token the positions that it sees, sorted."""
    start = mx.array(lengths, mx.int32)
    group.at(start, max(lengths) + num_new, lengths[0] if len(set(lengths)) == 1 else None)
    layer = group.layers[0]
    new = mx.concatenate([tokens(row, length, length + num_new) for row, length in enumerate(lengths)])
    mask = layer.make_mask(num_new, window_size=WINDOW)
    keys, values = layer.update_and_fetch(new, -new)
    assert np.array_equal(np.array(keys), -np.array(values))
    held = np.array(keys)[:, 0, :, 0]
    if mask is None or isinstance(mask, str):
        visible = np.tril(np.ones((num_new, held.shape[1]), bool), held.shape[1] - num_new)
        visible = np.broadcast_to(visible, (len(lengths), num_new, held.shape[1]))
    else:
        visible = np.broadcast_to(np.array(mask)[:, 0], (len(lengths), num_new, held.shape[1]))
    return [
        [sorted((held[row][visible[row, i]] - 1000 * row).astype(int).tolist()) for i in range(num_new)]
        for row in range(len(lengths))
    ]


def first_seen(kind: type[RotatingKVCache], at: int) -> int:
    return at // WINDOW * WINDOW if kind is ChunkedCache else max(0, at - WINDOW + 1)


def expected(lengths: list[int], num_new: int, kind: type[RotatingKVCache]) -> list[list[list[int]]]:
    return [[list(range(first_seen(kind, at), at + 1)) for at in range(length, length + num_new)] for length in lengths]


@pytest.mark.parametrize("chunks", [[1], [3], [8], [9], [5, 1, 1, 1, 1], [20], [20, 7], [64, 1], [16, 16, 16, 1, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_last_tokens_of_a_prompt_in_any_chunks_are_those_of_its_window_in_order(chunks, kind):
    num_tokens = sum(chunks)
    keys, values = last_tokens(prefilled(0, chunks, kind=kind))
    assert np.array(keys)[0, 0, :, 0].tolist() == list(range(max(0, num_tokens - WINDOW), num_tokens))
    assert np.array_equal(np.array(keys), -np.array(values))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_see_their_windows_over_random_accepts_joins_and_removals(seed, kind):
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(1, 60))]
    group = BatchCache.of([prefilled(0, [lengths[0]], kind=kind)])
    for _ in range(60):
        action = rng.random()
        if action < 0.1 and len(lengths) < 4:
            size, row = int(rng.integers(1, 70)), len(lengths)
            parts = [size] if size < 3 else [size - 2, 1, 1]
            group.join([[prefilled(row, parts, kind=kind)]])
            lengths.append(size)
        elif action < 0.15 and len(lengths) > 1:  # the last one: the others keep their numbers
            lengths.pop()
            group.select(list(range(len(lengths))), max(lengths) + 1)
        num_new = int(rng.integers(1, 5))
        assert seen(group.layers[0], group, lengths, num_new) == expected(lengths, num_new, kind)
        lengths = [length + int(rng.integers(1, num_new + 1)) for length in lengths]  # the others are rejected
    for row, length in enumerate(lengths):
        taken = group.layers[0].row(row, length)
        keys, _ = last_tokens(taken)
        assert type(taken) is kind
        assert (np.array(keys)[0, 0, :, 0] - 1000 * row).tolist() == list(range(max(0, length - WINDOW), length))


def test_memory_of_a_row_is_that_of_its_window_however_long_it_is():
    group = BatchCache.of([prefilled(0, [100, 1], 300)])
    sizes = []
    for length in (101, 400, 5000):
        group.reserve(length)
        sizes.append(group.layers[0].keys.shape[2])
    assert sizes == [256, ring_slots(300), ring_slots(300)] == [256, 300 + RING_MARGIN, 300 + RING_MARGIN]
