"""Granite and MiniCPM give the logits of mlx_lm for token ids, and the library still needs the patch."""

from importlib import import_module
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.worker.patches import embedding_scale
from tests.support import zoo
from tests.support.families import FAMILIES

TOKEN_IDS = mx.array([zoo.prompt(20)], mx.int32)


@pytest.mark.parametrize("name", ["granite", "granitemoe", "minicpm3"])
def test_token_ids_get_the_logits_of_the_other_library(name, tmp_path: Path):
    lm = zoo.load(zoo.make(tmp_path / name, FAMILIES[name]))
    module = import_module(f"mlx_lm.models.{name}")
    other = module.Model(module.ModelArgs.from_dict(FAMILIES[name].config))
    weights = dict(tree_flatten(lm.parameters()))
    other.load_weights(list(weights.items()))
    embedding_scale.install()
    logits = lm(TOKEN_IDS, cache=zoo.empty_cache(lm)).logits
    np.testing.assert_allclose(np.array(logits), np.array(other(TOKEN_IDS)), atol=1e-4)


@pytest.mark.parametrize("model", embedding_scale._library_calls)
def test_the_library_still_scales_only_the_embeddings_that_it_is_given(model):
    """When this fails, see whether the patch can go."""
    calls = []

    class Probe:
        """The first layers of the model, up to the scale."""

        args = type("Args", (), {"scale_emb": 3.0})
        embedding_multiplier = 3.0
        layers = ()

        def embed_tokens(self, token_ids: mx.array) -> mx.array:
            return mx.ones((*token_ids.shape, 4))

        def norm(self, hidden: mx.array) -> mx.array:
            calls.append(float(hidden.max()))
            return hidden

    library, ids = embedding_scale._library_calls[model], mx.zeros((1, 1), mx.int32)
    library(Probe(), ids, cache=[None])
    library(Probe(), ids, cache=[None], inputs_embeds=mx.ones((1, 1, 4)))
    assert calls == [1.0, 3.0]
