"""Qwen3-Next's recurrent layers: equal to the library's, and able to take drafts back, which the library's are not."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import ArraysCache
from mlx_vlm.models.qwen3_next.language import Qwen3NextGatedDeltaNet

from engine.worker.language_model import LanguageModel
from engine.worker.patches import gated_delta_next
from engine.worker.rewind import rewind_unsupported_reason
from tests.support.families import FAMILIES
from tests.support.zoo import new_module


def test_layer_computes_what_the_library_computes():
    gated_delta_next.install()
    lm = new_module(FAMILIES["qwen3_next"].config).language_model
    layer = lm.model.layers[0].linear_attn
    inputs = mx.array(np.random.default_rng(0).standard_normal((1, 9, 64)), mx.float32)
    ours, theirs = ArraysCache(size=2), ArraysCache(size=2)
    for start, end in ((0, 5), (5, 6), (6, 9)):
        piece = inputs[:, start:end]
        found, expected = layer(piece, cache=ours), gated_delta_next.library_call(layer, piece, cache=theirs)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
    assert np.abs(np.array(expected)).max() > 1e-3


def test_library_still_overwrites_its_states(monkeypatch: pytest.MonkeyPatch):
    """If it does not, the patch can go."""
    gated_delta_next.install()
    language_model = LanguageModel(new_module(FAMILIES["qwen3_next"].config).language_model)
    assert rewind_unsupported_reason(language_model) is None
    monkeypatch.setattr(Qwen3NextGatedDeltaNet, "__call__", gated_delta_next.library_call)
    assert rewind_unsupported_reason(language_model) is not None
