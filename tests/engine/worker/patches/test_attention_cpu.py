"""Attention with numpy's softmax gives what the library gives, and is still needed."""

import platform
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models import qwen3
from mlx_vlm.models.cache import BatchKVCache, KVCache

from engine.worker.patches import attention_cpu


def draw(num_queries: int, num_keys: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(num_queries)
    shapes = (2, 4, num_queries, 16), (2, 2, num_keys, 16), (2, 2, num_keys, 24)
    q, k, v = (mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for shape in shapes)
    return 3 * q, k, v


def difference(one: mx.array, other: mx.array) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float(np.abs(np.array(one) - np.array(other)).max())


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(16, 16), (17, 400), (256, 256), (257, 257), (600, 1000)])
def test_attention_of_any_length_equals_that_of_the_library(num_queries, num_keys, mask):
    q, k, v = draw(num_queries, num_keys)
    found = attention_cpu.attention(q, k, v, KVCache(), 0.25, mask)
    assert difference(found, attention_cpu._library(q, k, v, KVCache(), 0.25, mask)) < 1e-5


def test_inputs_are_not_modified():
    q, k, v = draw(32, 40)
    before = [np.array(array) for array in (q, k, v)]
    mx.eval(attention_cpu.attention(q, k, v, KVCache(), 1.0, "causal"))
    assert all(np.array_equal(was, np.array(array)) for was, array in zip(before, (q, k, v), strict=True))


@pytest.mark.parametrize("case", ["few queries", "half precision", "mask", "sinks", "rows"])
def test_unsupported_cases_are_passed_to_the_library_unchanged(case, monkeypatch):
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention_cpu, "_library", lambda *args: calls.append(args))
    q, k, v = draw(8 if case == "few queries" else 32, 40, mx.float16 if case == "half precision" else mx.float32)
    cache = BatchKVCache([0]) if case == "rows" else KVCache()
    mask = mx.ones((32, 40), mx.bool_) if case == "mask" else "causal"
    sinks = mx.zeros(4) if case == "sinks" else None
    attention_cpu.attention(q, k, v, cache, 0.25, mask, sinks)
    assert calls == [(q, k, v, cache, 0.25, mask, sinks)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="installed on x86 alone")
def test_prompts_of_a_model_use_the_installed_attention(monkeypatch):
    attention_cpu.install()
    softmaxed: list[int] = []
    real = attention_cpu._softmax
    monkeypatch.setattr(attention_cpu, "_softmax", lambda scores, n: (softmaxed.append(n), real(scores, n)))
    config = qwen3.ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
            **{"max_position_embeddings": 64, "tie_word_embeddings": True},
        }
    )
    model = qwen3.Model(config)
    mx.eval(model.language_model(mx.zeros((1, 20), mx.int32), cache=[KVCache(), KVCache()]).logits)
    assert softmaxed == [20, 20]
