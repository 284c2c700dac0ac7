"""Chunks that fit a prompt's length give what the library's recurrence gives, and are still needed."""

import inspect

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta

from engine.worker.patches import gated_delta_chunks


@pytest.fixture(autouse=True)
def installed() -> None:
    gated_delta_chunks.install()


@pytest.mark.parametrize("length", [2, 7, 8, 9, 63, 64, 65, 1025])
@pytest.mark.parametrize("correlated", [False, True])
def test_chunked_outputs_and_state_of_any_length_equal_those_of_the_recurrence(length, correlated):
    rng = np.random.default_rng(length)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal((1, length, *shape)).astype(np.float32))

    keys = draw(2, 16) if not correlated else mx.ones((1, length, 2, 16)) + 0.01 * draw(2, 16)
    keys = keys / mx.linalg.norm(keys, axis=-1, keepdims=True)
    gates = mx.array(rng.uniform(0.3, 1, (1, length, 4)).astype(np.float32))
    betas = mx.array(rng.uniform(0.5, 1, (1, length, 4)).astype(np.float32))
    state = mx.array(rng.standard_normal((1, 4, 16, 16)).astype(np.float32))
    inputs = draw(2, 16) / 4, keys, draw(4, 16), gates, betas, state
    expected = gated_delta.gated_delta_ops(*inputs)
    found = gated_delta.gated_delta_chunked(*inputs)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(np.array(one) - np.array(other)).max() < 2e-5


def test_the_library_still_takes_64_tokens_at_a_time():
    """When this fails, see whether the patch can go."""
    assert inspect.signature(gated_delta_chunks._library).parameters["C"].default == 64


def test_short_prompts_get_short_chunks():
    assert [gated_delta_chunks.chunk_tokens(n) for n in (1, 64, 65, 1024, 1025, 10**6)] == [8, 8, 16, 16, 32, 32]
