"""The checks of kernels pass those of this device, and see a wrong one."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

from engine.worker import device_facts, kernel_checks, patches
from engine.worker.kernel_checks import KERNEL_CHECKS
from engine.worker.kernel_figure import KernelFigure
from engine.worker.kv_layer import BatchKVLayer


@pytest.fixture(autouse=True)
def installed() -> None:
    patches.install(decodes=True)


@pytest.mark.parametrize("name", KERNEL_CHECKS)
def test_kernels_of_this_device_are_within_the_limit(name):
    figure = KERNEL_CHECKS[name]()
    if isinstance(figure, KernelFigure):
        assert figure.value <= figure.limit, figure
    else:
        assert "Metal" in figure or "CUDA" in figure


def off_by_one_percent(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale what a function of the library returns, or the first of what it returns."""
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        return 1.01 * out if isinstance(out, mx.array) else (1.01 * out[0], *out[1:])

    monkeypatch.setattr(owner, name, wrong)


@pytest.mark.parametrize(
    ("check", "owner", "function"),
    [
        (kernel_checks.rotary_positions, MRoPERotaryEmbedding, "apply_rotary"),
        (kernel_checks.gated_delta_rule, gated_delta, "gated_delta_update"),
        (kernel_checks.gated_delta_states, gated_delta, "gated_delta_update_with_states"),
        (kernel_checks.quantized_head, nn.QuantizedLinear, "__call__"),
    ],
)
def test_kernel_that_is_off_by_one_percent_is_beyond_the_limit(check, owner, function, monkeypatch):
    off_by_one_percent(owner, function, monkeypatch)
    figure = check()
    assert figure.is_wrong and figure.value > figure.limit


def test_device_without_any_quantized_kernel_fails_and_one_without_a_single_mode_is_named(monkeypatch):
    apply = nn.QuantizedLinear.__call__

    def broken(modes: set[str]) -> Any:
        def call(layer: nn.QuantizedLinear, x: mx.array) -> mx.array:
            if layer.mode in modes:
                raise RuntimeError(f"no header for {layer.mode}")
            return apply(layer, x)

        return call

    monkeypatch.setattr(nn.QuantizedLinear, "__call__", broken({"mxfp4"}))
    figure = kernel_checks.quantized_head()
    assert figure.value <= figure.limit and "not on this device: mxfp4 (no header for mxfp4)" in figure.what
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", broken({"affine", "mxfp4", "nvfp4"}))
    figure = kernel_checks.quantized_head()
    assert figure.is_wrong and figure.value > figure.limit
    assert (
        figure.what.startswith("no quantized kernel works: ") and "affine 8-bit (no header for affine)" in figure.what
    )


def test_cache_that_is_copied_or_written_in_another_place_is_seen(monkeypatch):
    write = BatchKVLayer.update_and_fetch

    def copying(layer: BatchKVLayer, keys: mx.array, values: mx.array) -> Any:
        kept = layer.keys, layer.values
        out = write(layer, keys, values)
        mx.eval(layer.state, kept)
        return out

    monkeypatch.setattr(BatchKVLayer, "update_and_fetch", copying)
    copied = kernel_checks.cache_write()
    assert copied.value > copied.limit and not copied.is_wrong

    def misplaced(layer: BatchKVLayer, keys: mx.array, values: mx.array) -> Any:
        layer.cursor.start = mx.zeros(4, mx.int32)
        return write(layer, keys, values)

    monkeypatch.setattr(BatchKVLayer, "update_and_fetch", misplaced)
    assert kernel_checks.cache_write().value == float("inf")


def test_products_of_float32_are_told_from_shortened_ones(monkeypatch):
    assert device_facts.product_error() < 1e-5
    product = mx.array.__matmul__

    def shortened(a: mx.array, b: mx.array) -> mx.array:
        return product(a.astype(mx.float16).astype(mx.float32), b)

    monkeypatch.setattr(mx.array, "__matmul__", shortened)
    assert device_facts.product_error() > 1e-5
