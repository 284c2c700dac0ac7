"""Attention over a prompt by the CUDA kernel's source on a CPU, and the attention that it leaves to MLX."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker.patches import prompt_attention_cuda
from engine.worker.patches.prompt_attention_cuda import attend, attention, is_supported

CASES = {
    "causal": (70, 133, "causal"),
    "all keys": (5, 66, None),
    "mask": (66, 66, "mask"),
    "first chunk": (64, 64, "causal"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_s_source_attends_as_the_library(cuda_on_cpu, case):
    length, num_keys, mask = case
    mx.random.seed(0)
    q = mx.random.normal((2, 4, length, 64)).astype(mx.bfloat16)
    k, v = (mx.random.normal((2, 2, num_keys, 64)).astype(mx.bfloat16) for _ in range(2))
    if mask == "mask":
        mask = mx.random.uniform(shape=(2, 1, length, num_keys)) < 0.6
        mask[0, 0, 3] = False  # sees nothing: padding
    found = attend(q, k, v, 0.3, mask)
    wide = [x.astype(mx.float32) for x in (q, k, v)]
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=0.3, mask=mask)
    if case[2] == "mask":
        assert not mx.any(found[0, :, 3])
        found[0, :, 3] = expected[0, :, 3] = 0
    assert found.shape == expected.shape and found.dtype == mx.bfloat16
    assert mx.abs(found.astype(mx.float32) - expected).max() < 0.02


def _arrays(length=64, num_keys=128, head_dim=256, dtype=mx.bfloat16, kv_heads=2):
    q = mx.zeros((1, 4, length, head_dim), dtype)
    return q, *(mx.zeros((1, kv_heads, num_keys, head_dim), dtype) for _ in range(2))


def test_chunks_of_large_heads_are_supported():
    for mask in ("causal", None, mx.ones((64, 128), mx.bool_), mx.ones((1, 1, 64, 128), mx.bool_)):
        assert is_supported(*_arrays(), mask=mask, sinks=None)
    assert is_supported(*_arrays(head_dim=192, dtype=mx.float16), mask="causal", sinks=None)


@pytest.mark.parametrize(
    ("arrays", "mask"),
    [
        (_arrays(length=63), "causal"),
        (_arrays(head_dim=128), "causal"),
        (_arrays(dtype=mx.float32), "causal"),
        (_arrays(kv_heads=3), "causal"),
        (_arrays(num_keys=32), "causal"),
        (_arrays(), mx.zeros((64, 128))),
        (_arrays(), mx.ones((64, 1), mx.bool_)),
        (_arrays(), mx.ones((2, 64, 128), mx.bool_)),
    ],
    ids=[
        "few queries",
        "small heads",
        "float32",
        "heads",
        "more queries than keys",
        "added mask",
        "mask of one key",
        "mask by heads of keys",
    ],
)
def test_other_attention_is_mlx_s(arrays, mask):
    assert not is_supported(*arrays, mask=mask, sinks=None)


def test_sinks_and_short_chunks_are_computed_by_mlx():
    assert not is_supported(*_arrays(), mask="causal", sinks=mx.zeros(4))
    q, k, v = _arrays(length=8)
    assert mx.array_equal(
        attention(q, k, v, scale=1.0, mask="causal"), prompt_attention_cuda._library(q, k, v, scale=1.0, mask="causal")
    )
