"""The output layer computes the logits of some positions alone, and they are those of the library's whole forward."""

import copy

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.errors import EngineFailed
from engine.processing.checkpoint import num_embeddings
from engine.worker import patches
from engine.worker.language_model import LanguageModel
from tests.support.families import FAMILIES
from tests.support.family_calls import in_gate, recorded
from tests.support.molmo2_family import MOLMO2
from tests.support.night import some_at_night
from tests.support.zoo import empty_cache, new_module, prompt

NUM_TOKENS = 11
NO_SELECTION = {"molmo", "nemotron_h_nano_omni", "talkie"}
"""Families whose layers and output layer are one function, or whose forward is that of their base class."""


WITH_FLOATS = [name for name, family in FAMILIES.items() if family.quantization is None]


@pytest.mark.parametrize(
    "name",
    some_at_night(
        WITH_FLOATS,
        in_gate(WITH_FLOATS, recorded()) | NO_SELECTION,
        "families of the gate call the same functions of ours; the tests of batches select logits, too",
    ),
)
def test_selected_logits_are_those_of_the_whole_forward(name):
    patches.install(decodes=True)
    language_model = LanguageModel(new_module(FAMILIES[name].config).language_model)
    assert language_model.selects_positions == (name not in NO_SELECTION)
    if name in NO_SELECTION:
        return
    token_ids = mx.array([prompt(NUM_TOKENS), prompt(NUM_TOKENS, seed=1)], mx.int32)
    positions = np.broadcast_to(np.arange(NUM_TOKENS, dtype=np.int32), (3, 2, NUM_TOKENS))
    more = {"position_ids": mx.array(positions)} if language_model.explicit_positions else {}
    whole = np.array(language_model.lm(token_ids, cache=empty_cache(language_model.lm), **more).logits)
    for select, expected in ((lambda h: h[:, -1:], whole[:, -1:]), (lambda h: h[1:, 3:4], whole[1:, 3:4])):
        cache = language_model.make_cache()
        logits = language_model.extend_to_end(token_ids, None, cache, positions, select)[0]
        np.testing.assert_allclose(np.array(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [FAMILIES["qwen3"].config, FAMILIES["mamba2"].config, MOLMO2.config])
def test_every_token_with_an_embedding_is_counted(config):
    patches.install(decodes=True)
    language_model = LanguageModel(new_module(copy.deepcopy(config)).language_model)
    assert language_model.num_embeddings == num_embeddings(config)


def test_an_embedding_that_is_unknown_is_the_engines_failure_and_named():
    patches.install(decodes=True)
    module = new_module(FAMILIES["qwen3"].config).language_model
    module.model.embed_tokens = nn.LayerNorm(8, bias=False, affine=False)
    with pytest.raises(EngineFailed, match="the embedding is a LayerNorm with no arrays; its table must have one of"):
        _ = LanguageModel(module).num_embeddings
    del module.model.embed_tokens
    with pytest.raises(EngineFailed, match="Model has no embedding by a name that is known; known are embed_tokens"):
        _ = LanguageModel(module).num_embeddings
