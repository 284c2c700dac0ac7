"""CUDA's kernels on a CPU."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker.cuda_kernel import CudaKernel
from engine.worker.patches import (
    depthwise_cuda,
    experts_cuda,
    few_rows_kernel,
    gated_delta_prompt,
    prompt_attention_cuda,
    quantized_cuda,
    qwen35_moe_cuda,
)
from tests.support.cuda_on_cpu import Kernel

MADE = (
    few_rows_kernel.kernel_of,
    quantized_cuda._expansion,
    experts_cuda._grouping,
    qwen35_moe_cuda._choice,
    qwen35_moe_cuda._sum,
    depthwise_cuda._kernel,
    gated_delta_prompt._kernel,
    prompt_attention_cuda._kernel,
)


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let kernels that are made from now on be compiled by g++."""
    if shutil.which("g++") is None:
        assert not os.environ.get("CI"), "the kernels' sources are compiled by g++, which is not here"
        pytest.skip("the kernels' sources are compiled by g++, which is not here")
    monkeypatch.setattr(mx.fast, "cuda_kernel", partial(Kernel, tmp_path))
    monkeypatch.setattr(CudaKernel, "_cache", lambda *arguments: None)  # NVRTC is not here
    for cache in MADE:
        cache.cache_clear()
    yield
    for cache in MADE:
        cache.cache_clear()
