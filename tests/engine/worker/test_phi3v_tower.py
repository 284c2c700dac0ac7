"""Phi-3-vision: the features of the published code, for tiles side by side and above each other, and their tokens."""

from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.processing.hd_grid import HDGrid
from engine.processing.images import ImagePreprocessor, image_patches
from engine.processing.message import text_part
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.cubic_weights import cubic_weights
from engine.worker.phi3v_tower import Phi3VTower
from engine.worker.refused_families import refusal
from engine.worker.vision import VisionEncoder
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.night import some_at_night
from tests.support.phi3v_family import CONFIG, PHI3_V, cubic, num_tokens, pixels_of, published_features, small_tower
from tests.support.vision_zoo import image, make, reference

NUM_TOKENS = 3
SHAPES = {(90, 30): (1, 3), (30, 60): (2, 1), (50, 50): (2, 2)}
"""Sizes of images, and their arrangements of at most four tiles."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", PHI3_V)


@pytest.fixture
def module(model_dir: Path) -> Any:
    with small_tower():
        return load_model(model_dir)


def encoded(model_dir: Path, module: Any, size: tuple[int, int]) -> mx.array:
    """Return the features of an image of at most four tiles, computed block by block."""
    grid = HDGrid(patch_size=14, merge_size=2, resample=2, side=336, max_tiles=4)
    patches = image_patches(grid.cut(image(*size)), grid)
    vision = VisionEncoder(Phi3VTower(module), ImagePreprocessor(model_dir).normalization, 0)
    encoding = vision.begin(patches)
    while encoding.features is None:
        vision.advance(encoding, 1)
    assert encoding.features.shape == (patches.num_tokens, 64)
    return encoding.features


def in_library(module: Any, arrays: dict[str, mx.array], tiles: tuple[int, int]) -> mx.array:
    """Return the features of one image as the library computes them."""
    text, sizes = mx.zeros((1, num_tokens(*tiles), 64)), mx.array([tiles]) * 336
    return module.vision_model(arrays["views"], text, sizes, [[0, 0]])[0]


@pytest.mark.parametrize(
    ("size", "tiles"),
    some_at_night(SHAPES.items(), {((30, 60), (2, 1))}, "the gate compares tokens for tiles in a row", are_sets=True),
    ids=str,
)
def test_features_are_those_of_the_published_code_and_of_the_library_for_one_column_of_tiles(
    size: tuple[int, int], tiles: tuple[int, int], model_dir: Path, module: Any
):
    arrays = {name: mx.array(value) for name, value in pixels_of([image(*size)], 4).items()}
    assert tuple(np.array(arrays["arrangements"])[0]) == tiles
    features, [expected] = encoded(model_dir, module, size), published_features(module, arrays)
    np.testing.assert_allclose(features, expected, atol=1e-4)
    library = np.array(in_library(module, arrays, tiles))
    if tiles[1] == 1:
        np.testing.assert_allclose(features, library, atol=1e-4)
    else:
        assert np.abs(library - np.array(expected)).max() > 0.05, "the library has mended its rows: say so no longer"


def test_prompt_with_tiles_gets_the_tokens_of_the_library_in_chunks_and_beside_a_text(model_dir: Path, module: Any):
    preprocessor, tokenizer = ImagePreprocessor(model_dir), ChatTokenizer(model_dir)
    contents: dict[str, list[Any]] = {
        "image": [text_part("See "), image(90, 30), text_part(".")],
        "text": [text_part("Just tell a story about the sea.")],
    }
    requests, expected = [], {}
    for name, content in contents.items():
        shown = [part for part in content if not isinstance(part, dict)]
        images = tuple(preprocessor.patches(one) for one in shown)
        parts = [part if isinstance(part, dict) else {"type": "image"} for part in content]
        prompt = tokenizer.chat_prompt(
            [{"role": "user", "content": parts}], template_kwargs={}, placeholders=tokenizer.placeholders(images)
        )
        sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
        requests.append(EngineRequest(name, prompt.token_ids, sampling, (), images, boundaries=prompt.boundaries))
        pixels = pixels_of(shown) if shown else {}
        expected[name] = reference(module, prompt.token_ids.tolist(), pixels, NUM_TOKENS, PHI3_V)
    assert [one.tiles for one in requests[0].images] == [(1, 2)]
    with small_tower():
        runner = load_cold(EngineConfig(model=str(model_dir)))
    driver = Driver(runner, EngineConfig.model_validate({"prefill_chunk_tokens": 200}))
    driver.run({0: requests})
    for name, answer in expected.items():
        assert driver.errors[name] is None and driver.tokens[name] == answer.tokens
        logprobs = [one.logprob for chunk in driver.chunks[name] for one in chunk.logprobs]
        np.testing.assert_allclose(logprobs, answer.logprobs, atol=1e-3)


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 16])
def test_the_whole_is_reduced_as_by_a_cubic_kernel_of_four_values(factor: int):
    values = np.random.default_rng(0).normal(size=(7 * factor, 3)).astype(np.float32)
    np.testing.assert_allclose(cubic_weights(7 * factor, 7) @ values, cubic(values, 7), atol=1e-6)


@pytest.mark.night("the gate has towers of other families whose embeddings are quantized; on a CPU it takes long")
def test_projection_and_positions_may_be_quantized(model_dir: Path, module: Any):
    dense = np.array(encoded(model_dir, module, (64, 40)))
    nn.quantize(module.vision_model, group_size=32, bits=8)
    assert isinstance(
        module.vision_model.img_processor.vision_model.embeddings.position_embedding, nn.QuantizedEmbedding
    )
    packed = encoded(model_dir, module, (64, 40))
    assert packed.dtype == mx.float32
    assert 0 < np.abs(np.array(packed) - dense).max() < 0.2 * np.abs(dense).max()


@pytest.mark.night("the gate compares the features in float32; bfloat16 takes long on a CPU")
def test_features_have_the_dtype_of_the_weights(model_dir: Path, module: Any):
    dense = np.array(encoded(model_dir, module, (64, 40)))
    module.set_dtype(mx.bfloat16)
    features = encoded(model_dir, module, (64, 40))
    assert features.dtype == mx.bfloat16
    assert np.abs(np.array(features.astype(mx.float32)) - dense).max() < 0.1 * np.abs(dense).max()


def test_window_that_the_library_ignores_is_refused_by_name():
    assert refusal(CONFIG) is None
    assert refusal({**CONFIG, "sliding_window": None}) is None
    assert refusal({**CONFIG, "sliding_window": 2047}) == (
        "config.json has sliding_window 2047, which the library's module does not read"
    )
