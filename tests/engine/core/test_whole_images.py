"""Models whose image tokens see each other: no chunk of a prompt divides an image, whatever limits the chunk."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MIN_CHUNK_TOKENS, MemoryNeeds
from engine.core.prefill_scheduler import undivided
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import PrefillOutput
from engine.protocol import EngineRequest, ImagePatches, SamplingParams, SparsePlan
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner

IMAGE = 9
COSTS = MemoryCosts(base_bytes=1000, token_bytes=10, token_step_bytes=100)


def picture(num_tokens: int) -> ImagePatches:
    return ImagePatches(np.zeros((num_tokens, 3, 2, 2), np.uint8), (1, 1, num_tokens), num_tokens, f"{num_tokens}")


def request(runs: dict[int, int], num_tokens: int = 400, **more: Any) -> EngineRequest:
    """runs: numbers of image tokens by the place of the first one."""
    ids = np.full(num_tokens, 5, np.int32)
    for start, length in runs.items():
        ids[start : start + length] = IMAGE
    images = tuple(picture(length) for length in runs.values())
    return EngineRequest("one", ids, SamplingParams(8), (), images, **more)


def prompt_of(request: EngineRequest) -> Prompt:
    return Prompt([Row(request)], arrived_s=0.0, rank=0.0)


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected"),
    [
        (0, 10, 10),  # ends where the first image begins
        (0, 11, 10),
        (0, 109, 10),
        (0, 110, 110),  # ends where it ends
        (10, 1, 100),  # begins with it
        (10, 99, 100),
        (10, 100, 100),
        (10, 101, 101),
        (10, 150, 110),  # the second one begins after 120 tokens
        (120, 16, 80),
        (120, 200, 200),
        (390, 10, 10),  # behind all images
    ],
)
def test_a_chunk_ends_before_an_image_or_takes_all_of_it(start: int, num_tokens: int, expected: int):
    prompt = prompt_of(request({10: 100, 120: 80}))
    prompt.num_prefilled = start
    assert undivided(prompt, num_tokens, IMAGE) == expected


def test_images_at_both_ends_of_a_prompt():
    prompt = prompt_of(request({0: 30, 370: 30}))
    assert undivided(prompt, 7, IMAGE) == 30
    prompt.num_prefilled = 370
    assert undivided(prompt, 7, IMAGE) == 30


def test_places_of_a_sparse_prompt_are_those_of_its_plan():
    positions = np.concatenate([np.arange(10, 110), np.arange(200, 400)]).astype(np.int32)
    prompt = prompt_of(request({10: 100}, sparse=SparsePlan(positions, 0, "")))
    assert undivided(prompt, 40, IMAGE) == 100
    assert undivided(prompt, 120, IMAGE) == 120


class WholeRunner(FakeRunner):
    """A model whose image tokens see each other."""

    def __init__(self):
        super().__init__()
        self.image_token_id, self.whole_images = IMAGE, True


def ends_of(runner: FakeRunner, **config: Any) -> list[int]:
    """Compute one prompt with two images beside a decoding row; return where its chunks end."""
    spec, sizes, prefill = request({10: 100, 120: 80}), [], runner.prefill

    def recorded(rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        made = prefill(rows, max_tokens)
        if rows[0].spec is spec:
            sizes.append(made.num_tokens)
        return made

    runner.prefill = recorded
    limits = {"prefill_chunk_tokens": 64, "prefill_chunk_tokens_busy": 32, "prefix_cache": {"enabled": False}, **config}
    driver = Driver(runner, EngineConfig.model_validate(limits))
    other = replace(request({}, num_tokens=20), request_id="other", sampling=SamplingParams(64))
    driver.run({0: [other], 2: [spec]})
    assert driver.errors["one"] is None and len(driver.tokens["one"]) == 8
    return np.cumsum(sizes).tolist()


def test_chunks_of_a_model_whose_image_tokens_see_each_other_divide_no_image():
    ends = ends_of(WholeRunner())
    assert {10, 110, 120, 200} <= set(ends) and ends[-1] == 400
    assert not [end for end in ends if 10 < end < 110 or 120 < end < 200]


def test_chunks_of_other_models_end_anywhere():
    runner = FakeRunner()
    runner.image_token_id = IMAGE
    assert [end for end in ends_of(runner) if 10 < end < 110]


def test_an_image_is_one_chunk_also_where_memory_allows_only_smaller_chunks():
    runner = WholeRunner()
    needs = MemoryNeeds(COSTS, 10**6, 16, whole_images=True)
    runner.costs = COSTS
    runner.memory_limit_bytes = (
        COSTS.base_bytes + needs.min_bytes(needs.need([Row(request({10: 100, 120: 80}))])) + 2000
    )
    limits = {"prefill_chunk_tokens": 2048, "prefill_chunk_tokens_busy": 2048, "memory": {"headroom_gb": 0}}
    ends = ends_of(runner, **limits)
    assert {10, 110, 120, 200} <= set(ends) and not [end for end in ends if 10 < end < 110 or 120 < end < 200]
    assert max(np.diff(ends)) == 100, "the rest comes in smaller chunks"


def test_the_largest_image_is_reserved_as_one_chunk():
    rows = [Row(request({10: 100, 120: 80}))]
    (other, whole) = (MemoryNeeds(COSTS, 10**6, 16, is_whole) for is_whole in (False, True))
    assert (other.need(rows).least_chunk, whole.need(rows).least_chunk) == (MIN_CHUNK_TOKENS, 100)
    reserved = whole.prefill_reservation(whole.need(rows), chunk_tokens=0, end=400)
    assert reserved.step_bytes == reserved.min_step_bytes == COSTS.chunk(100, 400)
    assert whole.min_bytes(whole.need(rows)) > other.min_bytes(other.need(rows))
