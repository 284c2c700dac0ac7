"""A verified step keeps the samples behind its accepted drafts, and none behind a row's last token."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.acceptance import Acceptance

STOP = 9
SAMPLED = [1, 2, 3, 4]
"""Samples after the newest token and three drafts."""


def row(max_tokens: int, stops: tuple[int, ...] = ()) -> Row:
    return Row(EngineRequest("a", np.zeros(4, np.int32), SamplingParams(max_tokens), stops))


def counted(one: Row, drafts: list[int], sampled: list[int], position: int = 5, newest: int = 0) -> tuple[int, int]:
    """Return the accepted drafts and the kept samples of a row whose first sample has this output position."""
    tokens = mx.array([[newest, *drafts]], mx.int32)
    positions = position + mx.arange(len(sampled), dtype=mx.int32)[None]
    accepted, kept = Acceptance([one]).count(tokens, mx.array([sampled], mx.int32), positions)
    return int(np.array(accepted)[0]), int(np.array(kept)[0])


@pytest.mark.parametrize(
    ("drafts", "num_accepted"),
    [([1, 2, 3], 3), ([1, 2, 7], 2), ([1, 7, 3], 1), ([7, 2, 3], 0), ([7, 7, 7], 0)],
)
def test_a_row_keeps_the_sample_behind_its_accepted_drafts_and_none_behind_a_wrong_one(drafts, num_accepted):
    assert counted(row(100), drafts, SAMPLED) == (num_accepted, num_accepted + 1)


def test_a_step_without_drafts_keeps_its_sample():
    assert counted(row(100), [], [1]) == (0, 1)


@pytest.mark.parametrize(("left", "num_kept"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_no_sample_behind_the_last_of_max_tokens_is_kept(left, num_kept):
    assert counted(row(5 + left), [1, 2, 3], SAMPLED)[1] == num_kept


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_no_sample_behind_a_stop_token_is_kept(place):
    sampled = [*SAMPLED[:place], STOP, *SAMPLED[place + 1 :]]
    assert counted(row(100, (STOP,)), sampled[:3], sampled)[1] == place + 1


def test_a_row_that_has_its_stop_token_already_keeps_one_sample_which_is_discarded_later():
    assert counted(row(100, (STOP,)), [1, 2, 3], SAMPLED, newest=STOP)[1] == 1


def test_each_row_has_its_own_limits():
    tokens, sampled = mx.array([[0, 1, 2]] * 3, mx.int32), mx.array([[1, 2, 3]] * 3, mx.int32)
    positions = mx.array([[5, 6, 7]] * 3, mx.int32)
    rows = [row(100), row(6), row(100, (2, STOP))]
    accepted, kept = Acceptance(rows).count(tokens, sampled, positions)
    assert accepted.tolist() == [2, 2, 2] and kept.tolist() == [3, 1, 2]
