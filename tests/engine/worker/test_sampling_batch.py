"""Rows of a batch keep their own sampling parameters when others join and leave."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.sampling_batch import SamplingBatch

VOCAB_SIZE = 60
SAMPLING = (
    SamplingParams(9, temperature=0.0),
    SamplingParams(9, temperature=1.5, seed=1),
    SamplingParams(9, temperature=1.5, seed=2, top_k=30),
    SamplingParams(9, temperature=0.0, logit_bias=((7, 50.0),)),
)
LOGITS = mx.random.normal((len(SAMPLING), 4, VOCAB_SIZE), key=mx.random.key(0))
POSITIONS = mx.broadcast_to(mx.arange(4, dtype=mx.int32), LOGITS.shape[:2])


def batch_of(*indices: int) -> SamplingBatch:
    rows = [Row(EngineRequest(str(i), np.zeros(4, np.int32), SAMPLING[i], ())) for i in indices]
    return SamplingBatch.of(rows, VOCAB_SIZE)


def sampled(batch: SamplingBatch, *indices: int) -> list[list[int]]:
    """Return the tokens of a batch whose rows have these indices."""
    rows = mx.array(indices)
    noise = batch.noise(POSITIONS[rows])
    tokens = batch.sample(LOGITS[rows], mx.zeros((len(indices), 4), mx.int32), POSITIONS[rows], noise).tokens
    return np.array(tokens).tolist()


@pytest.mark.parametrize("stay", [(0, 1), (1, 3), (3,), (2, 0)])
def test_rows_that_stay_get_the_tokens_that_they_get_alone(stay):
    alone = [sampled(batch_of(i), i)[0] for i in range(len(SAMPLING))]
    assert len(set(map(tuple, alone))) == len(alone) and set(alone[3]) == {7}
    every = batch_of(0, 1).joined(batch_of(2, 3))
    assert sampled(every, 0, 1, 2, 3) == alone
    assert sampled(every.select(list(stay)), *stay) == [alone[i] for i in stay]
