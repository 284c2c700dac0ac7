"""Pieces of images among decode steps and chunks: their sizes, their order and their ends."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.cost_model import CostModel
from engine.core.runner import ImageLeft
from engine.protocol import Boundary, EngineRequest, FinishReason, ImagePatches, SamplingParams
from tests.engine.core.test_engine_core_poll import Inbox
from tests.engine.core.test_engine_core_steps import TimedRunner
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, answer

DEPTH = 24
BLOCK_S = 0.25
"""Seconds of a block for an image of NUM_PATCHES: a screenshot of 4k on a laptop, 6 s in all."""
NUM_PATCHES = 1000


class SeeingRunner(TimedRunner):
    """A FakeRunner whose prompts have images; a block takes a time in proportion to the patches."""

    def __init__(self, clock: Clock, **more: Any):
        super().__init__(clock, **more)
        self.blocks: dict[str, list[int]] = {}  # row id -> blocks left of each image

    def next_image(self, rows):
        left = self.blocks.setdefault(rows[0].id, [DEPTH] * len(rows[0].spec.images))
        for image, num_blocks in zip(rows[0].spec.images, left, strict=True):
            if num_blocks:
                return ImageLeft(len(image.patches), num_blocks, DEPTH)
        return None

    def encode(self, rows, num_blocks):
        image, left = self.next_image(rows), self.blocks[rows[0].id]
        self._called("encode", rows[0].id, num_blocks)
        assert image is not None and 1 <= num_blocks <= image.num_blocks
        left[next(i for i, each in enumerate(left) if each)] -= num_blocks
        self._clock.advance(num_blocks * BLOCK_S * image.num_patches / NUM_PATCHES)

    def prefill(self, rows, max_tokens):
        assert not rows[0].spec.images or self.next_image(rows) is None
        return super().prefill(rows, max_tokens)

    def drop(self, row_ids, lent=None):
        super().drop(row_ids, lent)
        for row_id in row_ids:
            self.blocks.pop(row_id, None)


def image(num_patches: int = NUM_PATCHES) -> ImagePatches:
    return ImagePatches(np.zeros((num_patches, 3, 2, 2), np.uint8), (1, 1, num_patches), num_patches // 4, "black")


def request(request_id: str, *images: ImagePatches, num_prompt: int = 20, max_tokens: int = 5) -> EngineRequest:
    sampling = SamplingParams(max_tokens, seed=len(request_id))
    return EngineRequest(request_id, np.arange(num_prompt, dtype=np.int32), sampling, (STOP,), images)


def driver_of(poll: Inbox | None = None, **config: Any) -> tuple[SeeingRunner, Driver]:
    clock = Clock()
    runner = SeeingRunner(clock)
    settings = {"mtp": "off", "prefix_cache": {"enabled": False}, **config}
    driver = Driver(runner, EngineConfig.model_validate(settings), clock, poll)
    sizes = (10, 100, NUM_PATCHES) * 2
    driver.run({0: [request("first", *map(image, sizes))]})  # what an image costs is known behind it
    runner.calls.clear()
    return runner, driver


def encoded(runner: SeeingRunner, row_id: str) -> list[int]:
    return [call[2] for call in runner.calls if call[:2] == ("encode", row_id)]


def test_a_piece_takes_no_longer_than_the_stall_while_rows_decode():
    runner, driver = driver_of(scheduler={"max_stall_s": 0.8})
    tokens = driver.run({0: [request("story", max_tokens=60)], 3: [request("look", image())]})
    assert encoded(runner, "look/0") == [3] * 8, "0.75 s each"
    names = [name for name, *_ in runner.calls]
    pieces = [i for i, name in enumerate(names) if name == "encode"]
    assert all("decode" in names[i:j] for i, j in pairwise(pieces)), "one in each step"
    assert tokens["story"] == answer(request("story", max_tokens=60)) and tokens["look"] == answer(request("look"))


def test_a_piece_is_one_block_if_even_that_takes_longer_than_the_stall():
    runner, driver = driver_of(scheduler={"max_stall_s": 0.1})
    driver.run({0: [request("story", max_tokens=60)], 3: [request("look", image())]})
    assert encoded(runner, "look/0") == [1] * DEPTH


def test_pieces_are_larger_while_no_row_decodes():
    runner, driver = driver_of(scheduler={"max_stall_s": 0.25})
    driver.run({0: [request("look", image(NUM_PATCHES // 10))]})
    assert len(encoded(runner, "look/0")) <= 3, "0.6 s"
    driver.run({0: [request("icon", image(NUM_PATCHES // 100))]})
    assert encoded(runner, "icon/0") == [DEPTH]


def test_a_small_image_and_its_prompt_take_one_step():
    runner, driver = driver_of()
    driver.core.add_request(request("icon", image(10), image(10)))
    driver.core.step()
    assert len(driver.tokens["icon"]) == 1 and encoded(runner, "icon/0") == [DEPTH, DEPTH]


def test_an_abort_between_two_pieces_ends_the_encoding():
    inbox = Inbox()
    runner, driver = driver_of(inbox)
    driver.core.add_request(request("look", image()))
    inbox.commands[inbox.num_polls + 4] = lambda core: core.abort("look")
    driver.run({0: []})
    assert len(encoded(runner, "look/0")) == 2 and not runner.blocks and "look" not in driver.finish
    assert driver.core.budget.reserved_bytes == 0


def test_a_short_prompt_passes_one_whose_image_takes_long():
    runner, driver = driver_of()
    driver.core.add_request(request("look", image()))
    driver.core.step()
    driver.core.add_request(request("text", num_prompt=50))
    while "text" not in driver.tokens:
        driver.core.step()
    assert sum(encoded(runner, "look/0")) < DEPTH / 2
    assert driver.run({0: []})["look"] == answer(request("look"))


def test_a_short_prompt_does_not_wait_for_a_prefix_behind_an_image_that_takes_long():
    """Both begin alike, and nothing of it is in the cache."""
    runner, driver = driver_of(prefix_cache={"enabled": True, "min_tokens": 4})
    system = (Boundary("system", 40),)
    driver.core.add_request(replace(request("look", image(), num_prompt=60), boundaries=system))
    driver.core.step()
    text = replace(request("text", num_prompt=50), boundaries=system)
    driver.core.add_request(text)
    while "text" not in driver.tokens:
        driver.core.step()
    assert sum(encoded(runner, "look/0")) < DEPTH / 2
    assert driver.run({0: []}) == {
        "first": answer(request("first")),
        "look": answer(request("look")),
        "text": answer(text),
    }


def test_an_image_that_fails_fails_its_request_alone():
    runner, driver = driver_of()
    driver.core.add_request(request("look", image()))
    driver.core.step()
    runner.broken = {"encode"}
    driver.core.step()
    runner.broken = set()
    assert driver.finish["look"] is FinishReason.ERROR and driver.errors["look"] == "prefill failed: RuntimeError"
    assert driver.run({0: [request("text")]})["text"] == answer(request("text"))
    assert not runner.blocks and driver.core.failed_steps_in_a_row == 0


def test_the_progress_of_an_image_piece_carries_its_predicted_time():
    runner, driver = driver_of(scheduler={"max_stall_s": 0.8})
    seen = []
    encode = runner.encode
    runner.encode = lambda rows, num_blocks: (seen.append(driver.core.progress.work), encode(rows, num_blocks))  # type: ignore[method-assign]
    driver.run({0: [request("story", max_tokens=60)], 3: [request("look", image())]})
    assert seen[0].name == "a piece of an image of 1000 patches (3 of 24 blocks)"
    assert seen[0].predicted_s == pytest.approx(0.75, rel=0.02)


def test_image_costs_are_learned_from_pieces_of_any_size():
    def seconds(num_patches: int) -> float:
        return 0.01 + 1e-4 * num_patches + 1e-8 * num_patches**2

    costs = CostModel()
    for i in range(40):
        num_patches, share = (256, 1024, 8192, 32_768)[i % 4], (1 / 24, 0.5, 1.0)[i % 3]
        costs.record_image(num_patches, share, share * seconds(num_patches))
    for num_patches in (400, 4096, 16_384):
        assert costs.image_s(num_patches) == pytest.approx(seconds(num_patches), rel=0.1)
    assert costs.image_s(4096, 0.25) == pytest.approx(costs.image_s(4096) / 4)
    assert not costs.is_measured, "chunks are another thing"
