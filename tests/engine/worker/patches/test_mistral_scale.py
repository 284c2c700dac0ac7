"""Rows of Mistral 3 and 4 have their queries scaled by their own positions, and the patch is still needed."""

import inspect

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.mistral3 import language as mistral3
from mlx_vlm.models.mistral4 import language as mistral4

from engine.worker.patches import mistral_scale


@pytest.fixture(autouse=True)
def installed() -> None:
    mistral_scale.install()


def test_each_row_gets_the_scale_of_its_own_positions():
    starts = [0, 7, 8, 100]
    mistral_scale._starts.append(mx.array(starts))
    try:
        together = np.array(mistral4._get_llama_4_attn_scale(0, 3, 0.5, 8))
    finally:
        mistral_scale._starts.pop()
    alone = [np.array(mistral_scale._library_scale(start, start + 3, 0.5, 8)) for start in starts]
    assert together.shape == (4, 1, 3, 1)
    assert np.array_equal(together[:, 0], np.stack(alone))


@pytest.mark.parametrize("model", [mistral3.Ministral3, mistral4.Mistral4Model])
def test_the_library_still_reads_the_position_of_the_first_row(model):
    """When this fails, see whether the patch can go."""
    assert "offset[0]" in inspect.getsource(mistral_scale._library_calls[model])
