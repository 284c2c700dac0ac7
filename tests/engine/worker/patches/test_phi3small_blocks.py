"""Phi-3-small's blocks count from the start of a text, for each row, and the patch is still needed."""

import inspect
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.phi3small.config import ModelConfig

from engine.worker.patches import phi3small_blocks

BLOCK, LOCAL, STRIDE, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 3, 4, 2, 8
NUM_SLOTS = 150
CONFIG = ModelConfig.from_dict(
    {
        "model_type": "phi3small",
        "hidden_size": HEADS * HEAD_DIM,
        "dense_attention_every_n_layers": 4,
        "ff_intermediate_size": 32,
        "gegelu_limit": 20.0,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 100_352,
        "blocksparse_block_size": BLOCK,
        "blocksparse_num_local_blocks": LOCAL,
        "blocksparse_vert_stride": STRIDE,
    }
)


@pytest.fixture(autouse=True)
def _installed() -> None:
    phi3small_blocks.install()


def reference(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the attention [heads, L, head_dim] of one row in float64, token by token."""
    output = np.zeros(queries.shape)
    for head in range(HEADS):
        for i, position in enumerate(positions):
            seen = [
                slot
                for slot in range(position + 1)
                if position // BLOCK - slot // BLOCK < LOCAL or (slot // BLOCK + head + 1) % STRIDE == 0
            ]
            own = head // (HEADS // KV_HEADS)
            scores = np.exp(keys[own, seen] @ queries[head, i])
            output[head, i] = scores @ values[own, seen] / scores.sum()
    return output


@pytest.mark.parametrize("starts", [(0, 0), (141, 141), (40, 97), (31, 139)])
def test_each_row_sees_the_blocks_of_its_own_position(starts: tuple[int, int]):
    length = NUM_SLOTS if starts == (0, 0) else 9
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((2, HEADS, length, HEAD_DIM))
    keys, values = rng.standard_normal((2, 2, KV_HEADS, NUM_SLOTS, HEAD_DIM))
    positions = np.array(starts)[:, None] + np.arange(length)
    seen: Any = np.arange(NUM_SLOTS) <= positions[:, None, :, None]
    attention: Any = phi3small_blocks.Attention(CONFIG, 0)
    arrays = [mx.array(one.astype(np.float32)) for one in (queries, keys, values)]
    found = attention._block_sparse_attention(*arrays, 1.0, mx.array(seen))
    expected = [reference(*row) for row in zip(queries, keys, values, positions, strict=True)]
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_every_fourth_layer_is_dense_and_unused_tokens_are_never_said():
    lm = phi3small_blocks.LanguageModel(CONFIG)
    assert [layer.self_attn.block_sparse for layer in lm.layers] == [True, True, True, False]
    logits = np.array(lm(mx.array([[1, 2]]), cache=lm.make_cache()).logits)
    unused = np.array(lm._dummy_tokenizer_ids)
    assert np.isneginf(logits[..., unused]).all() and np.isfinite(np.delete(logits, unused, axis=-1)).all()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("attention", "scores = scores + mask"),
        ("attention", "self._block_sparse_mask(L, keys.shape[-2])"),
        ("layer", "layer_idx % args.dense_attention_every_n_layers == 0"),
        ("logits", "out[self._dummy_tokenizer_ids]"),
    ],
)
def test_the_library_still_computes_it_so(name: str, line: str):
    """When this fails, see whether the patch can go."""
    assert line in inspect.getsource(phi3small_blocks.LIBRARY[name])
