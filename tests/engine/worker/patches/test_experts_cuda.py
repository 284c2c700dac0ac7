"""Which experts CUDA's kernels take, and what their sources compute, on a CPU, where the lanes take turns.

The self-test checks their results on a GPU.
"""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import switch_layers as text_layers
from mlx_vlm.models import switch_layers

from engine.worker.kernel_checks import experts_error
from engine.worker.patches import experts_cuda, many_rows, qwen35_moe_cuda, warpgroup_kernel
from tests.support.night import some_at_night

CASES = [
    (1, 8, (32, 32), {"group_size": 32, "bits": 4}),
    (18, 4, (32, 32), {"group_size": 32, "bits": 4}),
    (20, 5, (64, 96), {"group_size": 32, "bits": 4}),
    (7, 40, (64, 96), {}),
    (40, 6, (64, 96), {"group_size": 32, "bits": 8}),
    (2, 40, (64, 96), {"group_size": 32, "bits": 8}),
]
"""Tokens, experts, sizes and quantization: blocks of one pair and of up to 16, of several for an expert."""


@pytest.mark.parametrize(
    "case", some_at_night(CASES, CASES[:2], "the gate runs the kernels of single pairs and of pairs in groups")
)
def test_the_kernels_sources_choose_experts_and_compute_and_weigh_their_results(cuda_on_cpu, case):
    assert experts_error(*case) < 2e-2


MANY = [(20, 4, (64, 32), {"group_size": 32, "bits": 4}), (40, 6, (352, 96), {"group_size": 32, "bits": 8})]


@pytest.mark.parametrize("case", some_at_night(MANY, MANY[:1], "the gate runs the kernel with weights of 4 bits"))
def test_experts_of_many_tokens_are_multiplied_by_blocks_of_as_many_rows(cuda_on_cpu, monkeypatch, case):
    monkeypatch.setattr(experts_cuda, "MANY_PAIRS", 8)
    assert experts_error(*case) < 2e-2


BY_WARPGROUPS = [(52, 4, (160, 96), 32), (40, 6, (352, 160), 32), (200, 7, (512, 384), 128)]
"""Tokens, experts, sizes and group size: blocks of several numbers of rows, and outputs in part and of two blocks."""


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize(
    "case", some_at_night(BY_WARPGROUPS, BY_WARPGROUPS[:1], "the gate runs the kernel with blocks of unlike sizes")
)
def test_experts_of_many_tokens_are_multiplied_by_warpgroups_on_hopper_gpus(cuda_on_cpu, monkeypatch, case, is_aligned):
    """Arrays whose places do not allow for copies of 16 bytes are copied otherwise."""
    num_tokens, num_experts, sizes, group_size = case
    asked, of_experts = [], many_rows.of_experts
    monkeypatch.setattr(many_rows, "of_experts", lambda bits: asked.append(of_experts(bits)) or asked[-1])
    monkeypatch.setattr(many_rows, "has_warpgroups", lambda: True)
    monkeypatch.setattr(experts_cuda, "MANY_PAIRS", 8)
    if not is_aligned:
        source, aligned = warpgroup_kernel.SOURCE, "const bool aligned = "
        assert aligned in source
        monkeypatch.setattr(warpgroup_kernel, "SOURCE", source.replace(aligned, f"{aligned}false && "))
    assert experts_error(num_tokens, num_experts, sizes, {"group_size": group_size, "bits": 4}) < 2e-2
    assert {one.name for one in asked} == {"warpgroups"}


def test_pairs_are_grouped_by_their_experts(cuda_on_cpu):
    chosen = mx.array([3, 0, 3, 3, 1, 3, 3, 0], mx.int32)
    order, tiles = (np.array(found) for found in experts_cuda._grouped(chosen, 5, 4, 7))
    assert sorted(order[:2]) == [1, 7] and order[2] == 4 and sorted(order[3:]) == [0, 2, 3, 5, 6]
    assert tiles[:4].tolist() == [[0, 0, 2], [1, 2, 1], [3, 3, 4], [3, 7, 1]]
    assert not tiles[4:, 2].any()


@pytest.mark.parametrize("is_normalized", [True, False])
def test_of_equal_logits_the_first_experts_are_chosen_and_of_unknown_ones_any(cuda_on_cpu, is_normalized):
    """There are more experts than a warp has lanes."""
    logits = np.full((3, 40), -np.inf, np.float32)
    logits[0, [2, 34, 36, 37, 39]], logits[1], logits[2] = [1.0, 3.0, 3.0, 2.0, 3.0], 0.0, np.nan
    indices, scores = (np.array(found) for found in qwen35_moe_cuda.choice(mx.array(logits), 2, is_normalized))
    assert indices[:2].tolist() == [[34, 36], [0, 1]]
    assert ((indices >= 0) & (indices < 40)).all() and np.isnan(scores[2]).all()
    others = np.exp([1.0, 2.0, 3.0]).sum()
    expected = [0.5, np.exp(3.0) / (others + 2 * np.exp(3.0))]
    np.testing.assert_allclose(scores[0], expected[0 if is_normalized else 1], rtol=1e-5)


FOUR_BITS: dict[str, Any] = {"group_size": 32, "bits": 4}


def _module(layers, inner=96, quantization=FOUR_BITS, **options):
    module = layers.SwitchGLU(64, inner, 4, **options)
    if quantization:
        nn.quantize(module, **quantization)
    module.set_dtype(mx.bfloat16)
    return module


@pytest.mark.parametrize("layers", [switch_layers, text_layers], ids=["mlx_vlm", "mlx_lm"])
def test_experts_of_other_forms_are_the_library_s(layers):
    x = mx.zeros((2, 1, 64), mx.bfloat16)
    assert experts_cuda.is_supported(_module(layers), x)
    assert experts_cuda.is_supported(_module(layers, quantization=None), x)
    assert not experts_cuda.is_supported(_module(layers), x.astype(mx.float32))
    assert not experts_cuda.is_supported(_module(layers), mx.concatenate([x, x], axis=-1))
    most = mx.broadcast_to(x[:1, :1], (1, experts_cuda.MAX_TOKENS, x.shape[-1]))
    assert experts_cuda.is_supported(_module(layers), most)
    assert not experts_cuda.is_supported(_module(layers), mx.concatenate([most, most[:, :1]], axis=1))
    assert not experts_cuda.is_supported(_module(layers, bias=True), x)
    assert not experts_cuda.is_supported(_module(layers, activation=nn.GELU()), x)
    assert not experts_cuda.is_supported(_module(layers, quantization={**FOUR_BITS, "mode": "mxfp4"}), x)
    assert not experts_cuda.is_supported(_module(layers, quantization={"group_size": 32, "bits": 6}), x)
    mixed = _module(layers, quantization=None)
    mixed.up_proj = mixed.up_proj.to_quantized(32, 4)
    mixed.set_dtype(mx.bfloat16)
    assert not experts_cuda.is_supported(mixed, x)
    narrow = _module(layers, inner=80, quantization=None)
    assert not experts_cuda.is_supported(narrow, x)


def test_unsupported_experts_get_what_the_library_computes():
    module, x = switch_layers.SwitchGLU(64, 96, 4), mx.random.normal((2, 1, 64))
    text = text_layers.SwitchGLU(64, 96, 4)
    text.update(module.parameters())
    chosen = mx.array([[[0, 3]], [[1, 2]]], mx.uint32)
    assert mx.array_equal(experts_cuda.switch_glu(module, x, chosen), module(x, chosen))
    assert mx.array_equal(experts_cuda.text_switch_glu(text, x, chosen), text(x, chosen))


def test_weights_and_a_shared_result_are_combined_as_in_the_library(cuda_on_cpu):
    module, exact = _module(switch_layers), switch_layers.SwitchGLU(64, 96, 4)
    nn.quantize(exact, **FOUR_BITS)
    exact.update(module.parameters())
    exact.set_dtype(mx.float32)
    x, shared = (mx.random.normal((2, 1, 64), key=mx.random.key(i)) for i in range(2))
    x, shared = (one.astype(mx.bfloat16) for one in (x, shared))
    chosen, weights = mx.array([[[0, 3]], [[1, 2]]], mx.uint32), mx.array([[[0.25, 0.75]], [[0.5, 0.5]]])
    found = experts_cuda.switch_glu(module, x, chosen, weights, shared)
    expected = exact(x.astype(mx.float32), chosen, weights, shared.astype(mx.float32))
    assert mx.allclose(found.astype(mx.float32), expected, atol=0.02 * float(mx.abs(expected).max()))
