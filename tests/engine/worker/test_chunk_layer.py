"""Llama 4 sees chunks: the library, a row's cache and rows in a group against forwards with a mask and no cache."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.worker import patches
from engine.worker.chunk_layer import ChunkedCache
from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from tests.support.families import FAMILIES
from tests.support.families.family import WINDOW
from tests.support.zoo import empty_cache, load, make, prompt

TOLERANCE = 1e-4  # of logits of size 5
LENGTHS = [45, 13]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patches.install(decodes=True)
    return load(make(tmp_path_factory.mktemp("llama4") / "model", FAMILIES["llama4"]))


def reference(lm: Any, token_ids: list[int]) -> np.ndarray:
    """Return the logits [L, vocab] of a forward without caches, each layer with a mask made by hand."""
    slots = np.arange(len(token_ids))
    causal = slots[None] <= slots[:, None]
    chunks = causal & (slots[None] // WINDOW == slots[:, None] // WINDOW)
    hidden = lm.model.embed_tokens(mx.array([token_ids], mx.int32))
    for i, layer in enumerate(lm.layers):
        mask: Any = causal if i % 4 == 3 else chunks
        hidden = layer(hidden, mx.array(mask), cache=None)
    return np.array(lm.lm_head(lm.model.norm(hidden)))[0]


@pytest.mark.parametrize("chunk", [1, 5, 8, 19, 64])
@pytest.mark.parametrize("is_library", [True, False])
def test_a_prompt_in_pieces_gets_the_logits_of_a_forward_without_a_cache(lm, chunk, is_library):
    token_ids = prompt(45)
    cache = empty_cache(lm) if is_library else LanguageModel(lm).make_cache()
    assert is_library or [type(layer) for layer in cache[:3]] == [ChunkedCache] * 3
    pieces = [token_ids[start : start + chunk] for start in range(0, 45, chunk)]
    found = [np.array(lm(mx.array([piece], mx.int32), cache=cache).logits[0]) for piece in pieces]
    np.testing.assert_allclose(np.concatenate(found), reference(lm, token_ids), atol=TOLERANCE)


@pytest.mark.parametrize("num_new", [1, 3])
def test_rows_at_different_positions_get_the_logits_of_a_forward_without_a_cache(lm, num_new):
    """Their temperatures differ as well: it rises every eight tokens."""
    model, token_ids = LanguageModel(lm), [prompt(length + 24, seed) for seed, length in enumerate(LENGTHS)]
    rows = [model.make_cache() for _ in LENGTHS]
    for ids, length, row in zip(token_ids, LENGTHS, rows, strict=True):
        model.extend(mx.array([ids[:length]], mx.int32), None, row, np.zeros((3, 1, length), np.int32))
    group = BatchCache.of(rows[0], as_offset=True)
    group.join(rows[1:])
    expected = [reference(lm, ids) for ids in token_ids]
    for done in range(0, 24, num_new):
        at = [length + done for length in LENGTHS]
        new = mx.array([ids[start : start + num_new] for ids, start in zip(token_ids, at, strict=True)], mx.int32)
        layers = group.at(mx.array(at, mx.int32), max(at) + num_new)
        found = np.array(model.decode(new, layers, mx.zeros(new.shape, mx.int32))[0])
        for row, start in enumerate(at):
            np.testing.assert_allclose(found[row], expected[row][start : start + num_new], atol=TOLERANCE)
