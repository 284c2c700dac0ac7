"""DeepSeek V4's pools with the patch, and what the library still does without it."""

from collections.abc import Iterator
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import PoolingCache
from mlx_vlm.models.deepseek_v4.config import ModelConfig
from mlx_vlm.models.deepseek_v4.language import Compressor, DeepseekV4RoPE, Indexer, LocalAttention

from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from engine.worker.patches import deepseek_v4_pools
from engine.worker.patches.deepseek_v4_pools import LIBRARY
from tests.support.families import FAMILIES
from tests.support.zoo import load, make, prompt

TOLERANCE = 1e-4
LENGTHS = (30, 13)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    deepseek_v4_pools.install()
    yield
    deepseek_v4_pools.install()


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict(FAMILIES["deepseek_v4"].config | fields)


def compressor(ratio: int) -> Any:
    made = Compressor(config(), ratio, 16)
    made.ape = mx.random.normal(made.ape.shape, key=mx.random.key(1))
    for i, layer in enumerate((made.wkv, made.wgate)):
        layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(2 + i))
    return made


def entries(made: Any, compress: Any, num_tokens: int, chunk: int) -> np.ndarray:
    """Return the entries of tokens in pieces, with the library's cache."""
    x, cache, found = (
        mx.random.normal((1, num_tokens, 64), key=mx.random.key(0)),
        PoolingCache(made.compress_ratio),
        None,
    )
    for at in range(0, num_tokens, chunk):
        found = compress(made, x[:, at : at + chunk], cache, at)
    return np.array(found)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("chunk", [300, 128, 5, 1])
def test_entries_are_those_of_the_library_in_one_piece(ratio, chunk):
    made = compressor(ratio)
    whole = entries(made, LIBRARY["compress"], 300, 300)
    assert whole.shape == (1, 300 // ratio, 16)
    np.testing.assert_allclose(entries(made, Compressor.__call__, 300, chunk), whole, atol=TOLERANCE)


def test_the_library_still_forgets_the_window_before_a_piece():
    """When this fails, see whether `_compress` can go."""
    made = compressor(4)
    whole = entries(made, LIBRARY["compress"], 32, 32)
    assert np.abs(entries(made, LIBRARY["compress"], 32, 8) - whole).max() > 0.1


class Pool:
    """Entries that are there, of which every token sees all."""

    def __init__(self, entries: mx.array):
        self.entries = entries

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: int) -> tuple[mx.array, mx.array, int]:
        return kv[:, :0], gate[:, :0], 0

    def update_and_fetch(self, new: mx.array) -> mx.array:
        return self.entries

    def make_mask(self, num_new: int, offset: int) -> None:
        return None


def chosen(index_call: Any, num_tokens: int) -> list[set[int]]:
    """Return the entries that the last token chooses among 4000, and those whose scores are best."""
    args = config(index_topk=16)
    index = Indexer(args, 4)
    shapes = [(1, num_tokens, 64), (1, num_tokens, 32), (1, 4000, 16), (8, 64), (8 * 16, 32)]
    drawn = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    x, residual, there, index.weights_proj.weight, index.wq_b.weight = drawn
    rope = DeepseekV4RoPE(8, 10000.0)
    pool: Any = Pool(there)
    found = np.array(index_call(index, x, residual, rope, pool, 16000))[0, -1]
    queries = rope(index.wq_b(residual).reshape(1, num_tokens, 8, 16).transpose(0, 2, 1, 3), 16000)
    scores = mx.maximum(queries[:, :, -1] @ there[0].T, 0)[0] * index.weights_proj(x)[0, -1][:, None]
    return [set(found.tolist()), set(np.argsort(-np.array(scores.sum(axis=0)))[:16].tolist())]


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_best_of_all_entries_are_chosen(num_tokens):
    found, best = chosen(deepseek_v4_pools._index, num_tokens)
    assert found == best


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_library_still_chooses_among_blocks(num_tokens):
    """When this fails, see whether `_index` can go."""
    found, best = chosen(LIBRARY["index"], num_tokens)
    assert found != best


@pytest.mark.parametrize(("attend", "is_right"), [(deepseek_v4_pools._attend, True), (LIBRARY["attend"], False)])
def test_the_library_still_writes_several_tokens_of_a_group_to_one_place(tmp_path, attend, is_right):
    """When it is right without the patch, `_attend` can go."""
    lm = load(make(tmp_path / "model", FAMILIES["deepseek_v4"]))
    model, token_ids = LanguageModel(lm), [prompt(length + 3, length) for length in LENGTHS]
    rows, expected = [model.make_cache() for _ in LENGTHS], []
    for ids, row in zip(token_ids, rows, strict=True):
        expected.append(np.array(lm(mx.array([ids], mx.int32), cache=model._nested(model.make_cache())).logits[0, -3:]))
        lm(mx.array([ids[:-3]], mx.int32), cache=model._nested(row))
    group = BatchCache.of(rows[0], as_offset=True)
    group.join(rows[1:])
    layers = group.at(mx.array(LENGTHS, mx.int32), max(LENGTHS) + 3)
    LocalAttention.__call__ = attend
    new = mx.array([ids[-3:] for ids in token_ids], mx.int32)
    found = np.array(model.decode(new, layers, mx.zeros(new.shape, mx.int32))[0])
    assert np.allclose(found, np.array(expected), atol=TOLERANCE) == is_right
