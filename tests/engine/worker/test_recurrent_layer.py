"""A recurrent layer that keeps all states of a verified forward, as on a GPU, returns to the one of the kept tokens."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.worker.recurrent_layer import BatchRecurrentLayer

WIDTH, CHANNELS, STATE = 2, 3, (4, 5)
RNG = np.random.default_rng(0)
BEFORE, NEW = RNG.normal(size=(3, WIDTH, CHANNELS)), RNG.normal(size=(3, 4, CHANNELS))
START, CHANGES = RNG.normal(size=(3, *STATE)), RNG.normal(size=(3, 4, *STATE))
SOURCE, STATES = np.concatenate([BEFORE, NEW], axis=1), START[:, None] + np.cumsum(CHANGES, axis=1)


def updated(layer: BatchRecurrentLayer) -> None:
    """Compute four tokens as the library's layers do."""

    def update(state: mx.array, num_states: int | None) -> tuple[mx.array, ...]:
        assert np.allclose(state, START, atol=1e-6) and num_states == 3
        every = mx.array(STATES.astype(np.float32))
        return every[..., 0], every[:, -1], every[:, :num_states]

    layer.update_window(0, mx.array(SOURCE.astype(np.float32)), WIDTH)
    layer.update_recurrent(1, 4, update)


def recorded(layer: BatchRecurrentLayer) -> None:
    """Compute four tokens as Orchard's kernels do."""
    layer.record(mx.array(SOURCE.astype(np.float32)), mx.array(STATES.astype(np.float32)))


@pytest.mark.parametrize("compute", [updated, recorded])
@pytest.mark.parametrize("num_kept", [(1, 1, 1), (1, 4, 2), (3, 2, 4)])
def test_each_row_returns_to_the_state_after_its_kept_tokens(compute, num_kept):
    layer = BatchRecurrentLayer([mx.array(one.astype(np.float32)) for one in (BEFORE, START)])
    layer.recording = True
    compute(layer)
    layer.commit(mx.array(num_kept, mx.int32))
    assert not layer.recording and not layer.recorded
    for row, num in enumerate(num_kept):
        np.testing.assert_allclose(layer[0][row], SOURCE[row, num : num + WIDTH], rtol=1e-6)
        np.testing.assert_allclose(layer[1][row], STATES[row, num - 1], rtol=1e-6)
