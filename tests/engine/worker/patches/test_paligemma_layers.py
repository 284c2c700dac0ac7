"""PaliGemma's layers mask the tokens of answers, have the windows of Gemma 2, and still need the patch."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from engine.worker.patches import families, paligemma_layers
from tests.support.families.family import WINDOW
from tests.support.paligemma_family import ONE, TWO
from tests.support.zoo import new_module

IDS = mx.array([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]], mx.int32)


@pytest.fixture(params=[ONE, TWO], ids=["gemma", "gemma2"])
def language_model(request: pytest.FixtureRequest) -> Any:
    families.correct()
    mx.random.seed(0)
    return new_module(request.param.config).language_model


def states(language_model: Any, ids: mx.array, library: bool = False) -> np.ndarray:
    call: Any = paligemma_layers._library if library else type(language_model.model).__call__
    return np.array(call(language_model.model, ids, cache=make_prompt_cache(language_model)))


def test_a_token_of_an_answer_sees_none_after_it(language_model: Any):
    whole, part = states(language_model, IDS), states(language_model, IDS[:, :7])
    np.testing.assert_allclose(whole[:, :7], part, atol=1e-5)


def test_the_library_still_lets_it_see_all_of_them(language_model: Any):
    """When this fails, see whether the patch can go."""
    whole, part = states(language_model, IDS, library=True), states(language_model, IDS[:, :7], library=True)
    assert np.abs(whole[:, :7] - part).max() > 1e-2


def test_layers_with_windows_have_caches_of_windows(language_model: Any):
    kinds = [type(layer) for layer in make_prompt_cache(language_model)]
    if language_model.model_type == "gemma":
        assert kinds == [KVCache] * 3
    else:
        assert kinds == [RotatingKVCache, KVCache, RotatingKVCache]
        assert make_prompt_cache(language_model)[0].max_size == WINDOW


def test_rows_with_masks_of_their_own_get_the_states_of_each_alone(language_model: Any):
    """As many rows as tokens: the library would take a mask of two axes for one of rows."""
    ids = mx.concatenate([IDS[:, :2], IDS[:, 4:6]])
    together = np.array(language_model.model(ids))
    for row in range(2):
        np.testing.assert_allclose(together[row], np.array(language_model.model(ids[row : row + 1]))[0], atol=1e-5)
