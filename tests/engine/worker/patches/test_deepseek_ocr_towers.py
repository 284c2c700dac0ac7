"""The vision towers of DeepSeek-OCR compute what their authors' code does, where the library differs from it."""

from types import SimpleNamespace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.deepseekocr import sam
from mlx_vlm.models.deepseekocr.config import VisionConfig
from mlx_vlm.models.deepseekocr.vision import EncoderLayer, VisionEmbeddings
from PIL import Image

from engine.worker.patches import deepseek_ocr_towers, families

CONFIG = VisionConfig("vision", hidden_size=8, intermediate_size=16, num_attention_heads=2)
X = mx.linspace(-3, 3, 8)[None]


def layer() -> Any:
    families.correct()
    return EncoderLayer(CONFIG)


def test_clip_has_quick_gelu_and_an_epsilon_of_a_hundred_thousandth():
    made = layer()
    assert made.layer_norm1.eps == made.layer_norm2.eps == 1e-5
    hidden = made.mlp.fc1(X)
    np.testing.assert_allclose(made.mlp(X), made.mlp.fc2(nn.gelu_fast_approx(hidden)), rtol=1e-5, atol=1e-6)


def resized_by_pillow(places: np.ndarray, side: int) -> np.ndarray:
    """Reduce [side, side, width] with Pillow, whose bicubic filter PyTorch's antialiasing has."""
    channels = [Image.fromarray(channel).resize((side, side), Image.Resampling.BICUBIC) for channel in places.T]
    return np.stack([np.asarray(channel).T for channel in channels], axis=-1)


def test_positions_of_a_tile_are_reduced_with_antialiasing():
    families.correct()
    known = np.random.default_rng(0).standard_normal((1, 1 + 16 * 16, 3)).astype(np.float32)
    nothing: Any = SimpleNamespace()
    ours = np.array(VisionEmbeddings._get_abs_pos(nothing, mx.array(known), 1 + 10 * 10))
    expected = resized_by_pillow(known[0, 1:].reshape(16, 16, 3), 10)
    np.testing.assert_array_equal(ours[0, 0], known[0, 0])
    np.testing.assert_allclose(ours[0, 1:].reshape(10, 10, 3), expected, atol=1e-4)
    assert VisionEmbeddings._get_abs_pos(nothing, mx.array(known), 1 + 16 * 16).shape == known.shape


def test_relative_positions_of_a_tile_are_interpolated_between_centres():
    families.correct()
    known = np.random.default_rng(0).standard_normal((127, 3)).astype(np.float32)
    centres = (np.arange(79) + 0.5) * 127 / 79 - 0.5
    at = np.stack([np.interp(centres, np.arange(127), column) for column in known.T], axis=-1)
    expected = at[np.arange(40)[:, None] - np.arange(40)[None] + 39]
    ours = sam.get_rel_pos(40, 40, mx.array(known))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    np.testing.assert_allclose(np.array(ours)[7, 7], known[63], atol=1e-4)
    np.testing.assert_array_equal(
        sam.get_rel_pos(64, 64, mx.array(known)), deepseek_ocr_towers.library_rel_pos(64, 64, mx.array(known))
    )


def test_the_patch_is_still_needed():
    made = layer()
    known = mx.array(np.random.default_rng(0).standard_normal((1, 257, 8)).astype(np.float32))
    pairs = [
        (made.mlp(X), deepseek_ocr_towers.library_mlp(made.mlp, X)),
        (sam.get_rel_pos(40, 40, known[0, :127]), deepseek_ocr_towers.library_rel_pos(40, 40, known[0, :127])),
        (
            VisionEmbeddings._get_abs_pos(made, known, 101),
            deepseek_ocr_towers.library_abs_pos(made, known, 101),
        ),
    ]
    for ours, library in pairs:
        assert np.abs(np.array(ours) - np.array(library)).max() > 1e-3
    fresh: Any = EncoderLayer.__new__(EncoderLayer)
    deepseek_ocr_towers.library_init(fresh, CONFIG)
    assert fresh.layer_norm1.eps == 1e-6
