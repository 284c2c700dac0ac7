"""DeepSeek-OCR on an image that is cut into tiles: the features of the library, bit by bit, and its tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model
from PIL import Image

from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor
from engine.processing.message import text_part
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, ImagePatches, SamplingParams
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.sighted_family import SightedFamily
from tests.support.view_families import DEEPSEEK_OCR, DEEPSEEK_OCR_2, embedder_of, small_towers, view_features
from tests.support.vision_zoo import image, make, reference

GRID, ROW, SMALL = image(700, 700, seed=2), image(1300, 650, seed=1), image(64, 40, seed=3)
NUM_TOKENS = 3

CASES = {
    "deepseekocr": (DEEPSEEK_OCR, GRID, (2, 2)),
    "deepseekocr_2": (DEEPSEEK_OCR_2, ROW, (1, 2)),
}
"""Family, an image that is cut, and its tiles. DeepSeek-OCR 2 has no rows of features: it appends tile to tile."""


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[SightedFamily, Image.Image, tuple[int, int]]:
    return request.param


@pytest.fixture(scope="module")
def family(case: tuple[SightedFamily, Image.Image, tuple[int, int]]) -> SightedFamily:
    return case[0]


@pytest.fixture(scope="module")
def shown(
    request: pytest.FixtureRequest, case: tuple[SightedFamily, Image.Image, tuple[int, int]]
) -> list[Image.Image]:
    """Return an image that is cut, and at night one that is not, which takes as long."""
    return [case[1], SMALL] if request.config.option.night else [case[1]]


@pytest.fixture(scope="module")
def model_dir(family: SightedFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", family)


@pytest.fixture(scope="module")
def module(model_dir: Path) -> Any:
    with small_towers():
        return load_model(model_dir)


@pytest.fixture(scope="module")
def images(model_dir: Path, shown: list[Image.Image]) -> list[ImagePatches]:
    preprocessor = ImagePreprocessor(model_dir)
    return [preprocessor.patches(one) for one in shown]


@pytest.fixture(scope="module")
def features(family: SightedFamily, module: Any, shown: list[Image.Image]) -> list[mx.array]:
    """Those of the library, computed once."""
    arrays = {name: mx.array(value) for name, value in family.pixels(shown).items()}
    found = view_features(module, arrays)
    mx.eval(found)
    return found


@pytest.mark.night("the gate compares the tokens that follow from them, and their logprobs")
def test_features_of_tiles_are_bit_for_bit_those_of_the_library(case, model_dir, module, images, features):
    """Block by block, with everything between two blocks evaluated."""
    family, _, tiles = case
    assert [one.tiles for one in images] == [tiles, (0, 0)]
    vision = VisionEncoder(
        make_tower(module, family.config["model_type"]), ImagePreprocessor(model_dir).normalization, 0
    )
    for one, expected in zip(images, features, strict=True):
        encoding = vision.begin(one)
        while encoding.features is None:
            vision.advance(encoding, 1)
        assert encoding.features.shape == expected.shape
        assert mx.array_equal(encoding.features, expected).item()


@pytest.mark.night("the gate compares them in float32")
def test_features_in_bfloat16_are_those_of_the_library_too(family, model_dir, shown, images):
    """As with published checkpoints, for which the library's processor rounds the pixels."""
    with small_towers():
        module: Any = load_model(model_dir)
    module.set_dtype(mx.bfloat16)
    arrays = {name: mx.array(value) for name, value in family.pixels(shown[:1]).items()}
    views = {name: arrays[name].astype(mx.bfloat16) for name in ("squares", "tiles")}
    vision = VisionEncoder(
        make_tower(module, family.config["model_type"]), ImagePreprocessor(model_dir).normalization, 0
    )
    ours, [expected] = vision.encode(images[0]), view_features(module, {**arrays, **views})
    assert ours.dtype == mx.bfloat16 and mx.array_equal(ours, expected).item()


def test_prompt_with_tiles_gets_the_tokens_of_the_library(family, model_dir, module, shown, images, features):
    tokenizer = ChatTokenizer(model_dir)
    content = [part for _ in shown for part in (text_part("See "), {"type": "image"}, text_part("."))]
    placeholders = tokenizer.placeholders(images)
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, placeholders=placeholders)
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
    request = EngineRequest("one", prompt.token_ids, sampling, (), tuple(images), boundaries=prompt.boundaries)
    known = replace(family, embedder=lambda module, pixels: embedder_of(module, features))
    expected = reference(module, prompt.token_ids.tolist(), family.pixels(shown), NUM_TOKENS, known)
    with small_towers():
        runner = load_cold(EngineConfig(model=str(model_dir)))
    driver = Driver(runner, EngineConfig.model_validate({"prefill_chunk_tokens": 200}))
    driver.run({0: [request]})
    assert driver.errors["one"] is None and driver.tokens["one"] == expected.tokens
    logprobs = [one.logprob for chunk in driver.chunks["one"] for one in chunk.logprobs]
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-3)
