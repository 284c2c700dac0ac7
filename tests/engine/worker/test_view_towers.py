"""DeepSeek-OCR on an image that is cut into tiles: the features of the library, bit by bit, and its tokens."""

from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model

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
from tests.support.view_families import DEEPSEEK_OCR, DEEPSEEK_OCR_2, small_towers, view_features
from tests.support.vision_zoo import image, make, reference

WIDE, TALL, SMALL = image(1300, 650, seed=1), image(500, 1900, seed=2), image(64, 40, seed=3)
NUM_TOKENS = 4


FAMILIES = {"deepseekocr": DEEPSEEK_OCR, "deepseekocr_2": DEEPSEEK_OCR_2}


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> SightedFamily:
    return request.param


@pytest.fixture(scope="module")
def model_dir(family: SightedFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", family)


@pytest.fixture(scope="module")
def module(model_dir: Path) -> Any:
    with small_towers():
        return load_model(model_dir)


@pytest.fixture(scope="module")
def images(model_dir: Path) -> list[ImagePatches]:
    preprocessor = ImagePreprocessor(model_dir)
    return [preprocessor.patches(one) for one in (WIDE, TALL, SMALL)]


@pytest.fixture(scope="module")
def features(family: SightedFamily, module: Any) -> list[mx.array]:
    arrays = {name: mx.array(value) for name, value in family.pixels([WIDE, TALL, SMALL]).items()}
    return view_features(module, arrays)


def test_features_of_tiles_are_bit_for_bit_those_of_the_library(family, model_dir, module, images, features):
    """Block by block, with everything between two blocks evaluated."""
    assert [one.tiles for one in images] == [(1, 2), (4, 1), (0, 0)]
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
def test_features_in_bfloat16_are_those_of_the_library_too(family, model_dir, images):
    """As with published checkpoints, for which the library's processor rounds the pixels."""
    with small_towers():
        module: Any = load_model(model_dir)
    module.set_dtype(mx.bfloat16)
    arrays = {name: mx.array(value) for name, value in family.pixels([WIDE]).items()}
    views = {name: arrays[name].astype(mx.bfloat16) for name in ("squares", "tiles")}
    vision = VisionEncoder(
        make_tower(module, family.config["model_type"]), ImagePreprocessor(model_dir).normalization, 0
    )
    ours, [expected] = vision.encode(images[0]), view_features(module, {**arrays, **views})
    assert ours.dtype == mx.bfloat16 and mx.array_equal(ours, expected).item()


def test_prompt_with_tiles_gets_the_tokens_of_the_library(family, model_dir, module, images):
    tokenizer = ChatTokenizer(model_dir)
    content = [text_part("See "), {"type": "image"}, text_part(" and "), {"type": "image"}, text_part(".")]
    shown, pictures = (images[0], images[2]), [WIDE, SMALL]
    placeholders = tokenizer.placeholders(shown)
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, placeholders=placeholders)
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
    request = EngineRequest("one", prompt.token_ids, sampling, (), shown, boundaries=prompt.boundaries)
    expected = reference(module, prompt.token_ids.tolist(), family.pixels(pictures), NUM_TOKENS, family)
    with small_towers():
        runner = load_cold(EngineConfig(model=str(model_dir)))
    driver = Driver(runner, EngineConfig.model_validate({"prefill_chunk_tokens": 200}))
    driver.run({0: [request]})
    assert driver.errors["one"] is None and driver.tokens["one"] == expected.tokens
    logprobs = [one.logprob for chunk in driver.chunks["one"] for one in chunk.logprobs]
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-3)
