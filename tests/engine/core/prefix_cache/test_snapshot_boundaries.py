"""Where the prefill of a prompt takes snapshots."""

from typing import Any

import numpy as np
import pytest

from engine.config import BoundaryKind
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.prompt_key import Media, PromptKey
from engine.core.prefix_cache.snapshot_boundaries import MOST_LEAST_TOKENS, choose_boundaries, least_tokens
from engine.core.runner import ChunkTime
from engine.protocol import Boundary


def chosen(*wanted: Boundary, num_tokens: int = 200, media: tuple[Media, ...] = (), **options: Any) -> list[int]:
    key = PromptKey("model", "", np.arange(num_tokens, dtype=np.int32), media)
    end = Boundary("prompt", num_tokens - 1)
    return [boundary.num_tokens for boundary in choose_boundaries([*wanted, end], key, 16, **options)]


def turns(*cuts: int, kind: BoundaryKind = "turn") -> list[Boundary]:
    return [Boundary(kind, cut) for cut in cuts]


def test_boundaries_are_chosen_in_the_order_of_the_prompt():
    assert chosen() == [199] and chosen(*turns(100, 50)) == [50, 100, 199]


def test_boundaries_too_close_together_get_no_snapshot():
    assert chosen(*turns(10)) == [199] and chosen(*turns(50, 60)) == [50, 199]
    assert chosen(num_tokens=16) == [] and chosen(num_tokens=17) == [16] and chosen(num_tokens=1) == []


def test_the_end_of_a_prompt_too_close_to_its_turn_gets_no_snapshot_even_if_the_turn_has_none():
    assert chosen(*turns(190)) == [190]
    assert chosen(*turns(179, 190)) == [179]


def test_boundaries_that_are_restored_or_too_close_to_the_restored_prefix_are_skipped():
    assert chosen(*turns(50, 100), start=50) == [100, 199]
    assert chosen(*turns(50, 100), start=90) == [199]


def test_boundary_within_an_image_is_skipped():
    image = Media(40, 60, "hash")
    assert chosen(*turns(40, 56, 100), media=(image,)) == [40, 100, 199]


def test_boundaries_beyond_the_last_token_are_skipped():
    assert chosen(*turns(200, 300)) == []
    assert chosen(*turns(150, kind="system"), *turns(200)) == [150]


def test_a_pinned_system_boundary_is_chosen_however_short_the_system_part_is():
    system = turns(5, kind="system")
    assert chosen(*system) == [199] and chosen(*system, is_pinned=True) == [5, 199]
    assert chosen(*system, is_pinned=True, start=5) == [199]


def test_of_two_boundaries_at_one_place_the_system_part_is_chosen():
    key = PromptKey("model", "", np.arange(200, dtype=np.int32))
    wanted = [*turns(50), *turns(50, kind="system")]
    assert choose_boundaries(wanted, key, 16) == turns(50, kind="system")


@pytest.mark.parametrize(
    ("token_s", "snapshot_s", "least"),
    [(1e-3, 0, 16), (1e-3, 0.005, 16), (1e-4, 0.005, 50), (2e-5, 0.005, 250), (1e-5, 0.005, MOST_LEAST_TOKENS)],
)
def test_the_fewer_seconds_a_token_takes_the_more_of_them_are_worth_a_snapshot(token_s, snapshot_s, least):
    costs = CostModel(chunk_times=[ChunkTime(n, 0.02 + n * token_s) for n in (64, 256)])
    assert least_tokens(snapshot_s, costs) == pytest.approx(least, rel=0.05)


def test_a_device_on_which_tokens_cost_no_measurable_time_caches_long_prefixes_all_the_same():
    costs = CostModel(chunk_times=[ChunkTime(64, 0.02), ChunkTime(256, 0.02)])  # as fast as it can be measured
    assert least_tokens(0.005, costs) == MOST_LEAST_TOKENS and least_tokens(0.0, costs) == 16
