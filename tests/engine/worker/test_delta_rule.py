"""The factored delta rule against the recurrence itself, token by token in float64."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker import delta_rule


def by_the_book(q, k, v, g, beta, state):
    """Outputs [B, T, Hv, Dv] and the states after each token."""
    q, k = (np.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t]))
        state = state + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        states.append(state)
    return np.stack(outputs, 1), states


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 4)]),
    smallest_decay=st.sampled_from([0.9, 0.1, 0.0]),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_chunked_delta_rule_equals_the_recurrence(batch, length, heads, smallest_decay, seed, data):
    rng = np.random.default_rng(seed)
    num_k_heads, num_v_heads = heads
    q, k = rng.normal(size=(2, batch, length, num_k_heads, 8))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)  # as the model does
    v = rng.normal(size=(batch, length, num_v_heads, 6))
    g = rng.uniform(smallest_decay, 1, (batch, length, num_v_heads))
    beta = rng.uniform(0, 1, g.shape)
    state = rng.normal(size=(batch, num_v_heads, 6, 8))
    expected, states = by_the_book(q, k, v, g, beta, state)
    y, factors = delta_rule.run(*(mx.array(x.astype(np.float32)) for x in (q, k, v, g, beta, state)))
    np.testing.assert_allclose(np.array(y), expected, rtol=2e-4, atol=2e-5)
    kept = [data.draw(st.integers(1, length)) for _ in range(batch)]
    after = np.array(factors.state_after(mx.array(state.astype(np.float32)), mx.array(kept, mx.int32)))
    for row, n in enumerate(kept):
        np.testing.assert_allclose(after[row], states[n - 1][row], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("decay", [0.0, 1e-38, 1.0])
def test_decays_at_their_limits_stay_finite(decay):
    ones = mx.ones((1, 4, 1, 4))
    g = mx.full((1, 4, 1), decay)
    y, factors = delta_rule.run(ones / 2, ones / 2, ones, g, mx.ones((1, 4, 1)), mx.ones((1, 1, 4, 4)))
    after = factors.state_after(mx.ones((1, 1, 4, 4)), mx.array([4]))
    assert np.isfinite(np.array(y)).all() and np.isfinite(np.array(after)).all()
