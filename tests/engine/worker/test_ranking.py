"""The highest scores against a stable sort of all of them."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.core.runner import NO_TOKEN
from engine.protocol import SamplingParams
from engine.worker import ranking
from engine.worker.ranking import BLOCK, best_first
from engine.worker.sampler import Sampler

SIZES = (16384, 20000, 248320)  # the second is no multiple of the block


def expected(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 20, 32])
@pytest.mark.parametrize("steps", [None, 8, 1], ids=["all different", "some equal", "mostly equal"])
def test_ranking_by_blocks_equals_a_stable_sort(size, count, steps):
    scores = np.random.default_rng(count).standard_normal((2, 3, size)).astype(np.float32)
    if steps is not None:
        scores = np.round(scores * steps) / steps
    assert count * BLOCK <= ranking.MAX_SHARE * size
    assert np.array_equal(best_first(mx.array(scores), count), expected(scores, count))


@pytest.mark.parametrize("count", [1, 20, 299, 300, 1000])
def test_ranking_of_a_small_vocabulary_equals_a_stable_sort(count):
    scores = np.round(np.random.default_rng(0).standard_normal((2, 300)) * 4).astype(np.float32)
    assert np.array_equal(best_first(mx.array(scores), count), expected(scores, count))


@pytest.mark.parametrize("num_allowed", [0, 1, 5, 200])
def test_masked_scores_come_last_and_never_from_behind_the_vocabulary(num_allowed):
    rng, size = np.random.default_rng(1), 20000
    scores = np.full((1, size), -np.inf, np.float32)
    scores[0, rng.choice(size, num_allowed, replace=False)] = 1.0
    scores[0, -1] = 2.0
    assert np.array_equal(best_first(mx.array(scores), 20), expected(scores, 20))


def test_indices_stay_within_the_vocabulary_where_scores_are_no_numbers():
    found = np.array(best_first(mx.full((1, 20000), mx.nan), 20))
    assert found.max() < 20000


def test_equal_logits_give_the_same_tokens_alone_and_beside_a_row_with_another_top_k():
    rng, rows = (
        np.random.default_rng(2),
        [SamplingParams(9, temperature=1.0, top_k=k, top_p=0.7, seed=k) for k in (5, 40)],
    )
    logits = mx.array(np.round(rng.standard_normal((2, 4, 20000))).astype(np.float32))
    positions = mx.arange(4)[None] * mx.ones((2, 1), mx.int32)

    def sampled(which: list[int]) -> np.ndarray:
        sampler, index = Sampler([rows[i] for i in which]), mx.array(which)
        return np.array(sampler(logits[index], sampler.noise(positions[index], 20000)))

    together = sampled([0, 1])
    assert np.array_equal(together, np.concatenate([sampled([0]), sampled([1])])) and (together != NO_TOKEN).all()
