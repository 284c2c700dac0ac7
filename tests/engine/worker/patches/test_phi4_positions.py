"""Positions of Phi-4's tower are interpolated linearly and with antialiasing, as Pillow does for each channel."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.phi4_siglip.vision import VisionEmbeddings
from PIL import Image

from engine.worker.patches import families, phi4_positions

TABLE = np.random.default_rng(0).normal(size=(16, 16, 8)).astype(np.float32)


def resized(resize, rows: int, columns: int) -> np.ndarray:
    found = resize(mx.array(TABLE), mx.array([[rows, columns]]), rows * columns)
    return np.array(found).reshape(rows, columns, -1)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (7, 30), (40, 12), (5, 3)])
def test_positions_are_those_of_a_linear_resize_with_antialiasing(rows: int, columns: int):
    families.correct()
    channels = [Image.fromarray(TABLE[..., i]).resize((columns, rows), Image.Resampling.BILINEAR) for i in range(8)]
    expected = np.stack([np.asarray(channel) for channel in channels], axis=-1)
    np.testing.assert_allclose(
        resized(VisionEmbeddings.resize_positional_embeddings, rows, columns), expected, atol=1e-5
    )
    if (rows, columns) != (16, 16):
        assert np.abs(resized(phi4_positions.library_resize, rows, columns) - expected).max() > 0.05
