"""An image that is encoded in pieces: the features of the undivided tower, bit by bit, and nothing left behind."""

import gc
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import ImageLeft
from engine.processing.images import ImagePreprocessor
from engine.protocol import ImagePatches
from engine.worker import loader
from engine.worker.model_runner import MLXRunner
from engine.worker.vision import VisionEncoder
from engine.worker.vision_tower import filled_frames
from engine.worker.vision_towers import make_tower
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.night import some_at_night


@pytest.fixture(scope="module")
def model() -> loader.LoadedModel:
    return loader.load(EngineConfig(), lambda progress: None)


@pytest.fixture
def vision(model: loader.LoadedModel) -> VisionEncoder:
    return VisionEncoder(make_tower(model.module, "qwen3_5"), ImagePreprocessor(model.path).normalization, 2**20)


def image_of(grid: tuple[int, int, int], patch: int, seed: int = 0) -> ImagePatches:
    """Noise on a grid of (frames, rows, columns) patches."""
    num_patches = grid[0] * grid[1] * grid[2]
    patches = np.random.default_rng(seed).integers(0, 256, (num_patches, 3, patch, patch)).astype(np.uint8)
    return ImagePatches(patches, grid, num_patches // 4, f"noise {grid} {seed}")


def undivided(model: loader.LoadedModel, vision: VisionEncoder, image: ImagePatches) -> mx.array:
    """The library's own forward."""
    tower = model.module.vision_tower
    pixels = filled_frames(vision._pixels(image), tower.patch_embed)
    return tower(pixels, mx.array([image.grid_thw], mx.int32))[0]


PIECES = [(1,), (2,), (3, 1), (1, 0, 2, 5), (100,)]


@pytest.mark.parametrize(
    ("grid", "pieces"),
    some_at_night(
        product(((1, 2, 2), (1, 6, 10), (1, 32, 24)), PIECES),
        [*product(((1, 2, 2), (1, 6, 10)), PIECES), ((1, 32, 24), PIECES[3])],
        "the gate divides smaller images by each size of pieces",
        are_sets=True,
    ),
)
def test_features_of_pieces_are_bit_for_bit_those_of_the_undivided_tower(model, vision, grid, pieces):
    image = image_of(grid, model.module.vision_tower.patch_embed.patch_size)
    encoding, sizes, num_pieces = vision.begin(image), cycle(pieces), 0
    while encoding.features is None:
        vision.advance(encoding, next(sizes))
        num_pieces += 1
    assert mx.array_equal(encoding.features, undivided(model, vision, image)).item()
    assert encoding.state is None, "what lay between the pieces is free"
    assert num_pieces >= -(-vision.num_blocks // max(pieces))


def test_an_image_that_has_been_encoded_in_pieces_is_kept(vision, picture):
    red = picture("red")
    encoding = vision.begin(red)
    while encoding.features is None:
        vision.advance(encoding, 1)
    assert vision.begin(red).features is encoding.features and vision.encode(red) is encoding.features


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Keeps no features. Never closed: that would take the main thread's streams from the tests that follow."""
    path = tiny_model(layers=2, interval=2, hidden=32, heads=2, kv_heads=1, agree=0.3)
    return load_cold(EngineConfig(model=str(path), vision_cache_mb=0))


def test_the_next_image_of_a_prompt_is_reported_with_its_remaining_blocks(runner, make_request, picture):
    runner.free_caches()
    red, wide = picture("red"), picture("green", size=(256, 96))
    row, depth = Row(make_request("two", "What is in the images?", (red, wide))), runner._vision.num_blocks
    assert runner.next_image([row]) == ImageLeft(len(red.patches), depth, depth)
    runner.encode([row], 1)
    assert runner.next_image([row]) == ImageLeft(len(red.patches), depth - 1, depth)
    runner.encode([row], depth)
    assert runner.next_image([row]) == ImageLeft(len(wide.patches), depth, depth)
    runner.encode([row], depth)
    assert runner.next_image([row]) is None
    runner.drop([row.id])
    again = Row(make_request("again", "What is in the images?", (wide, red)))
    assert runner.next_image([again]) is None, "both are kept"
    runner.drop([again.id])


def test_a_prompt_dropped_in_the_middle_of_an_image_frees_all_its_memory(runner, make_request, picture):
    row = Row(make_request("one", "What is in the image?", (picture("red", size=(512, 512)),)))
    left = []
    for _ in range(2):  # compiled functions keep their constants from the first time on
        runner.encode([row], 1)
        in_the_middle = mx.get_active_memory()
        runner.drop([row.id])
        runner.free_caches()
        gc.collect()
        left.append(mx.get_active_memory())
        assert in_the_middle > left[-1]
    assert left[0] == left[1]


def test_rows_decode_between_the_pieces_of_an_image_and_get_the_same_tokens(runner, make_request, picture):
    """With so short a stall each piece is one block."""
    large = picture("red", size=(512, 512))
    story = make_request("story", "Tell me a story.", max_tokens=30, stops=False)
    look = make_request("look", "What is in the image?", (large,), max_tokens=12, stops=False)
    config = EngineConfig.model_validate({"mtp": "off", "scheduler": {"max_stall_s": 1e-4}})
    alone = {}
    for request in (story, look):
        runner.free_caches()
        alone |= Driver(runner, config).run({0: [request]})
    runner.free_caches()
    driver, pieces = Driver(runner, config), []
    encode = runner.encode
    runner.encode = lambda rows, num_blocks: (
        pieces.append((num_blocks, len(driver.tokens["story"]))),
        encode(rows, num_blocks),
    )
    try:
        together = driver.run({0: [story], 3: [look]})
    finally:
        del runner.encode
    assert together == alone
    assert [num_blocks for num_blocks, _ in pieces] == [1] * runner._vision.num_blocks
    told = [num_tokens for _, num_tokens in pieces]
    assert told == sorted(set(told)), "the story went on between any two"
    assert driver.core.costs.image_s(len(large.patches)) > 0
