"""Padding tokens leave a recurrent state as it is by their decay and rate alone. The kernel itself needs CUDA."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_vlm.models.qwen3_5 import gated_delta

from engine.worker.patches.gated_delta_cuda import unmasked

BATCH, LENGTH, HEADS, K_DIM, V_DIM = 3, 7, 2, 32, 16


def test_decays_and_rates_without_a_mask_stand_for_the_masked_rule():
    mx.random.seed(0)
    q, k = (mx.random.normal((BATCH, LENGTH, HEADS, K_DIM)) for _ in range(2))
    v = mx.random.normal((BATCH, LENGTH, HEADS, V_DIM))
    g, beta = (mx.random.uniform(0.2, 0.9, (BATCH, LENGTH, HEADS)) for _ in range(2))
    state = mx.random.normal((BATCH, HEADS, V_DIM, K_DIM))
    own = mx.arange(LENGTH) < mx.array([[7], [4], [1]])
    expected_y, expected = gated_delta.gated_delta_ops(q, k, v, g, beta, state, own)
    y, found = gated_delta.gated_delta_ops(q, k, v, *unmasked(g, beta, own), state)
    np.testing.assert_array_equal(np.array(found), np.array(expected))
    np.testing.assert_array_equal(np.array(y)[np.array(own)], np.array(expected_y)[np.array(own)])


def test_without_a_mask_nothing_changes():
    g, beta = mx.ones((1, 2, 2)), mx.ones((1, 2, 2))
    assert unmasked(g, beta, None) == (g, beta)
