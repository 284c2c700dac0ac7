"""Pictures: the device normalises as the model's own processor does, and features are kept within bytes."""

from dataclasses import replace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor, normalize
from engine.worker import loader
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower


@pytest.fixture(scope="module")
def model() -> loader.LoadedModel:
    return loader.load(EngineConfig(), lambda progress: None)


def encoder(model: loader.LoadedModel, max_bytes: int = 2**20) -> VisionEncoder:
    return VisionEncoder(make_tower(model.module, "qwen3_5"), ImagePreprocessor(model.path).normalization, max_bytes)


def test_the_device_normalises_as_the_processor_does(model, picture):
    image = picture("red", size=(160, 96))
    pixels = np.array(encoder(model)._pixels(image))
    expected = normalize(image.patches, replace(ImagePreprocessor(model.path).normalization, temporal_patch_size=1))
    expected = expected.reshape(pixels.shape)
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected).max() < 1e-6


def test_an_image_has_one_feature_per_token_and_its_own_features(model, picture):
    vision = encoder(model)
    red, blue = picture("red"), picture("blue")
    features = vision.encode(red)
    assert features.shape == (red.num_tokens, model.config["vision_config"]["out_hidden_size"])
    assert not mx.allclose(features, vision.encode(blue)).item()


def test_a_repeated_image_is_not_encoded_again(model, picture):
    vision = encoder(model)
    assert vision.encode(picture("red")) is vision.encode(picture("red"))


def test_the_feature_cache_never_exceeds_its_bytes_and_evicts_the_least_recently_used(model, picture):
    size = encoder(model).encode(picture("red")).nbytes
    vision = encoder(model, max_bytes=2 * size)
    first = vision.encode(picture("red"))
    vision.encode(picture("blue"))
    assert vision.encode(picture("red")) is first
    vision.encode(picture("green"))
    assert vision.num_cached_bytes == 2 * size
    assert vision.encode(picture("red")) is first, "blue had been used longest ago"
    tiny = encoder(model, max_bytes=size - 1)
    tiny.encode(picture("red"))
    assert tiny.num_cached_bytes == 0


def test_no_two_blocks_of_a_tower_are_one_command_of_the_device(model, picture, monkeypatch):
    """macOS aborts commands that keep the GPU for several seconds."""
    vision, alone, evaluated = encoder(model), encoder(model), []
    evaluate = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (evaluated.append(arrays), evaluate(*arrays))[1])
    features = vision.encode(picture("red"))
    assert len(evaluated) >= vision.num_blocks > 1
    encoding = alone.begin(picture("red"))
    for _ in range(alone.num_blocks):
        alone.advance(encoding, 1)
    assert encoding.features is not None and mx.array_equal(features, encoding.features).item()
