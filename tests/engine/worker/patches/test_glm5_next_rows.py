"""GLM-5-Next's sparse attention with the patch, and what the library still does without it."""

from collections.abc import Iterator
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import BatchPoolingCache
from mlx_vlm.models.glm5_next.language import Glm5NextAttention, LanguageModel

from engine.worker.cursor import Cursor
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.patches import glm5_next_rows
from engine.worker.patches.glm5_next_rows import LIBRARY
from tests.support.families import FAMILIES
from tests.support.zoo import load, make, prompt

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make(tmp_path_factory.mktemp("glm5_next") / "model", FAMILIES["glm5_next"]))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    glm5_next_rows.install()
    yield
    glm5_next_rows.install()


def logits(lm: Any, chunk: int) -> np.ndarray:
    """Return the logits of a prompt in pieces, by the methods that are installed."""
    ids, cache = prompt(90), lm.make_cache()
    found = [lm(mx.array([ids[at : at + chunk]], mx.int32), cache=cache).logits[0] for at in range(0, 90, chunk)]
    return np.concatenate([np.array(one) for one in found])


@pytest.mark.parametrize("chunk", [90, 32, 5, 1])
def test_the_logits_are_those_of_the_library(lm, chunk):
    found = logits(lm, chunk)
    Glm5NextAttention.__call__, LanguageModel.make_cache = LIBRARY["attend"], LIBRARY["make_cache"]
    np.testing.assert_allclose(found, logits(lm, 90), atol=TOLERANCE)


def test_the_library_still_takes_one_length_for_all_rows(lm):
    """When this fails, see whether the patch can go. Both rows have the same tokens, at positions 20 and 9."""
    indexer = lm.layers[1].self_attn.indexer
    x, q_resid = mx.random.normal((2, 1, 64), key=mx.random.key(0)), mx.random.normal((2, 1, 32))
    bits, nothing = mx.zeros((2, 1, 256, 1), mx.bool_), mx.zeros((2, 1, 256, 0), mx.bool_)
    valid = BatchKVLayer(bits, nothing, Cursor(mx.array([20, 9]), 21))
    pools: Any = BatchPoolingCache(4, [0, 0])
    pools.pooled, pools._pool_lengths = mx.random.normal((2, 5, 16), key=mx.random.key(1)), [5, 2]
    seen = np.array(LIBRARY["index"](indexer, x, q_resid, None, valid, pools, mx.array([20, 9])))
    assert seen[1].max() > 9, "the second row sees slots that it has not written"
