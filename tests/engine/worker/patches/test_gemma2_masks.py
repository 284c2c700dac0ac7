"""Gemma 2's attention takes masks of several rows, and still needs the patch."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.gemma2.config import ModelConfig

from engine.worker.patches import gemma2_masks

NUM_ROWS, NUM_SLOTS = 3, 5


@pytest.fixture
def attention():
    config = ModelConfig.from_dict(
        {
            "model_type": "gemma2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "vocab_size": 16,
        }
    )
    mx.random.seed(0)
    gemma2_masks.install()
    return gemma2_masks.Attention(config)


def test_each_row_is_masked_by_its_own_mask(attention):
    x = mx.array(np.random.default_rng(0).standard_normal((NUM_ROWS, NUM_SLOTS, 16)).astype(np.float32))
    mask = np.tril(np.ones((NUM_ROWS, 1, NUM_SLOTS, NUM_SLOTS), bool))
    mask[1, 0, :, 0], mask[1, 0, 0, 0] = False, True
    together = np.array(attention(x, mx.array(mask)))
    alone = [np.array(attention(x[i : i + 1], mx.array(mask[i : i + 1]))) for i in range(NUM_ROWS)]
    assert np.allclose(together, np.concatenate(alone), atol=1e-6)


def test_the_library_still_refuses_masks_of_several_rows(attention):
    """When this fails, see whether the patch can go."""
    mask = mx.ones((NUM_ROWS, 1, NUM_SLOTS, NUM_SLOTS), mx.bool_)
    with pytest.raises(ValueError, match="broadcast"):
        mx.eval(gemma2_masks._library(attention, mx.zeros((NUM_ROWS, NUM_SLOTS, 16)), mask))
