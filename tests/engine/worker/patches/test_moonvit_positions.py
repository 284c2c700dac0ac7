"""Positions of Kimi-VL's tower are interpolated cubically with repeated borders, as PyTorch does."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.kimi_vl.vision import Learnable2DInterpPosEmb

from engine.worker.patches import families, moonvit_positions


def embeddings(rows: int, columns: int) -> Learnable2DInterpPosEmb:
    module = Learnable2DInterpPosEmb(rows, columns, 8)
    module.weight = mx.array(np.random.default_rng(0).normal(size=(rows, columns, 8)).astype(np.float32))
    return module


def kernel(distance: float) -> float:
    """Keys' cubic kernel with PyTorch's parameter."""
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def interpolated(table: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """One value after the other, each the sum of 4 x 4 neighbours; those behind the border are those of the border."""
    rows, columns, dim = table.shape
    made = np.zeros((*shape, dim))
    for row in range(shape[0]):
        for column in range(shape[1]):
            y, x = (row + 0.5) * rows / shape[0] - 0.5, (column + 0.5) * columns / shape[1] - 0.5
            for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
                for j in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
                    value = table[min(max(i, 0), rows - 1), min(max(j, 0), columns - 1)]
                    made[row, column] += kernel(y - i) * kernel(x - j) * value
    return made.reshape(-1, dim)


@pytest.mark.parametrize("shape", [(6, 5), (12, 10), (4, 9), (3, 2), (1, 40)])
def test_positions_are_those_of_a_cubic_interpolation_with_repeated_borders(shape: tuple[int, int]):
    families.correct()
    module = embeddings(6, 5)
    expected = interpolated(np.array(module.weight), shape)
    np.testing.assert_allclose(np.array(module._get_pos_emb(shape)), expected, atol=1e-5)
    if shape != (6, 5):
        library = np.array(moonvit_positions.library_positions(module, shape))
        assert np.abs(library - expected).max() > 0.05
