"""Which chunks of a prompt a sparse prefill keeps."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

from engine.core.spec_prefill.plan import KEPT_CHUNK_TOKENS, select
from tests.engine.core.spec_prefill.importances import KEEPS, importances


def chunk_means(importance: np.ndarray) -> list[float]:
    finite = [float(value) if math.isfinite(value) else 0.0 for value in importance]
    parts = [finite[start : start + KEPT_CHUNK_TOKENS] for start in range(0, len(finite), KEPT_CHUNK_TOKENS)]
    return [sum(part) / len(part) for part in parts]


@settings(deadline=None, max_examples=60)
@given(importances(), KEEPS)
def test_selection_consists_of_whole_chunks_in_order_and_meets_keep_within_two_chunks(importance, keep):
    num_tokens, chosen = len(importance), select(importance, float(keep))
    assert chosen.dtype == np.int64 and (np.diff(chosen) > 0).all()
    assert set(range(min(KEPT_CHUNK_TOKENS, num_tokens))) <= set(chosen.tolist()), "the first chunk"
    num_chunks = -(-num_tokens // KEPT_CHUNK_TOKENS)
    assert set(range((num_chunks - 1) * KEPT_CHUNK_TOKENS, num_tokens)) <= set(chosen.tolist()), "the last chunk"
    expected = [
        i for chunk in np.unique(chosen // KEPT_CHUNK_TOKENS).tolist()
        for i in range(chunk * KEPT_CHUNK_TOKENS, num_tokens)
        if i < (chunk + 1) * KEPT_CHUNK_TOKENS
    ]  # fmt: skip
    assert chosen.tolist() == expected, "chunks are not torn"
    assert math.ceil(keep * num_tokens) <= len(chosen) < keep * num_tokens + 2 * KEPT_CHUNK_TOKENS
    assert len(expected) == num_tokens or keep < 1


@settings(deadline=None, max_examples=60)
@given(importances(), KEEPS)
def test_selected_chunks_have_the_highest_means_and_none_is_superfluous(importance, keep):
    num_tokens, means = len(importance), chunk_means(importance)
    chosen = sorted({int(i) // KEPT_CHUNK_TOKENS for i in select(importance, float(keep))})
    free = [chunk for chunk in chosen if chunk not in (0, len(means) - 1)]
    left = [chunk for chunk in range(len(means)) if chunk not in chosen]
    for mine in free:
        for other in left:
            near = math.isclose(means[mine], means[other], rel_tol=1e-9)
            assert near or means[mine] > means[other], f"chunk {mine} instead of {other}"
            if importance[mine * KEPT_CHUNK_TOKENS :][:KEPT_CHUNK_TOKENS].tobytes() == (
                importance[other * KEPT_CHUNK_TOKENS :][:KEPT_CHUNK_TOKENS].tobytes()
            ):
                assert mine < other, "of equal chunks the first"
    if free:
        sizes = [min(KEPT_CHUNK_TOKENS, num_tokens - chunk * KEPT_CHUNK_TOKENS) for chunk in chosen]
        fewer = sum(sizes) - KEPT_CHUNK_TOKENS
        assert fewer < math.ceil(keep * num_tokens) or len(chosen) - 1 < math.ceil(keep * len(means))


@given(importances(), KEEPS)
@settings(deadline=None, max_examples=60)
def test_scores_that_are_not_finite_count_as_zero_and_selection_is_deterministic(importance, keep):
    before = importance.copy()
    chosen = select(importance, float(keep))
    assert importance.tobytes() == before.tobytes()
    finite = np.where(np.isfinite(importance), importance, np.float32(0))
    assert np.array_equal(chosen, select(finite, float(keep)))
    assert np.array_equal(chosen, select(importance.copy(), float(keep)))


@pytest.mark.parametrize("missing", [0, 1, KEPT_CHUNK_TOKENS - 1])
def test_the_number_of_chosen_chunks_is_the_least_that_meets_keep(missing):
    """For each keep in hundredths, whatever binary fractions make of it. missing: tokens of the last chunk."""
    for num_chunks in range(1, 52):
        num_tokens = num_chunks * KEPT_CHUNK_TOKENS - missing
        importance = np.zeros(num_tokens, np.float32)
        for percent in range(10, 101, 1 if num_chunks % 25 == 0 else 7):
            keep = Fraction(percent, 100)
            least = max(math.ceil(keep * num_chunks), min(2, num_chunks))
            enough = math.ceil(keep * num_tokens)
            while least * KEPT_CHUNK_TOKENS - missing < enough:  # the last one is always among them
                least += 1
            assert len(select(importance, float(keep))) == least * KEPT_CHUNK_TOKENS - missing, (num_tokens, keep)


def test_an_empty_prompt_has_no_chosen_tokens():
    assert select(np.empty(0, np.float32), 0.5).tolist() == []
