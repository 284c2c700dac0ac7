"""Padding tokens leave a recurrent state as it is by their decay and rate alone; the prompts' kernel on a CPU."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta

from engine.worker.patches import gated_delta_prompt
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


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim"), [(mx.bfloat16, 32, 48), (mx.float32, 64, 31)])
def test_the_prompts_kernel_computes_the_rule_wherever_a_chunk_ends(cuda_on_cpu, dtype, k_dim, v_dim):
    mx.random.seed(1)
    length = 2 * gated_delta_prompt.TOKENS + 3
    q, k = (mx.random.normal((2, length, 2, k_dim)).astype(dtype) * k_dim**-0.5 for _ in range(2))
    v = mx.random.normal((2, length, 4, v_dim)).astype(dtype)
    g, beta = (mx.random.uniform(0.2, 0.9, (2, length, 4)) for _ in range(2))
    state = mx.random.normal((2, 4, v_dim, k_dim))
    of_heads = [mx.repeat(x.astype(mx.float32), 2, axis=2) for x in (q, k)]
    expected_y, expected = gated_delta.gated_delta_ops(*of_heads, v=v.astype(mx.float32), g=g, beta=beta, state=state)
    y, last = gated_delta_prompt.run(q, k, v, g, beta, state)
    assert mx.allclose(last, expected, rtol=1e-4, atol=1e-4)
    assert mx.allclose(y.astype(mx.float32), expected_y, rtol=1e-2 if dtype == mx.bfloat16 else 1e-4, atol=1e-2)
    cut = gated_delta_prompt.TOKENS + 5
    first_y, half = gated_delta_prompt.run(*(x[:, :cut] for x in (q, k, v, g, beta)), state=state)
    second_y, whole = gated_delta_prompt.run(*(x[:, cut:] for x in (q, k, v, g, beta)), state=half)
    assert mx.array_equal(whole, last)
    assert mx.array_equal(mx.concatenate([first_y, second_y], axis=1), y)


def test_prompts_with_keys_that_do_not_fit_into_shared_memory_have_the_kernel_of_steps():
    q = k = mx.zeros((1, 2, 2, gated_delta_prompt.MAX_KEY_DIM))
    v = mx.zeros((1, 2, 2, 16))
    assert gated_delta_prompt.is_supported(q, k, v) and not gated_delta_prompt.is_supported(q, k, v.astype(mx.float16))
    large = mx.zeros((1, 2, 2, gated_delta_prompt.MAX_KEY_DIM + 32))
    assert not gated_delta_prompt.is_supported(large, large, v)
