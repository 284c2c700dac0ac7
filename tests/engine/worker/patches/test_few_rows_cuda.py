"""Which products CUDA's kernel for few rows takes, and what its source computes, on a CPU, where the lanes take turns.

The self-test checks its results on a GPU.
"""

import itertools

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest

from engine.worker.kernel_checks import few_rows_error
from engine.worker.patches import few_rows_cuda, many_rows, quantized_cuda, row_tiles_kernel
from engine.worker.patches.few_rows_cuda import UNQUANTIZED, Weight
from tests.support.night import some_at_night


@pytest.mark.parametrize(
    ("shape", "num_outputs", "taken"),
    [
        ((1, 1, 64), 48, True),
        ((2, 1, 64), 48, True),
        ((1, 2, 64), 48, True),
        ((2, 1, 80), 48, False),
        ((8, 4, 64), 48, True),
        ((33, 1, 64), 48, False),
        ((11, 3, 64), 48, False),
        ((16, 1, 32), few_rows_cuda.MANY_OUTPUTS, True),
        ((17, 1, 32), few_rows_cuda.MANY_OUTPUTS, False),
        ((17, 1, 32), few_rows_cuda.MANY_OUTPUTS - 1, True),
    ],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_up_to_32_rows_of_16_bits_are_taken(shape, num_outputs, taken, dtype):
    assert (
        few_rows_cuda.is_supported(mx.zeros(shape, dtype), Weight((mx.zeros((num_outputs, shape[-1]), dtype),)))
        is taken
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_up_to_128_rows_of_quantized_weights_are_taken(bits):
    layer = nn.Linear(64, 48, bias=False).to_quantized(32, bits)
    layer.set_dtype(mx.bfloat16)
    weight = Weight.of(layer)
    assert weight is not None
    assert [few_rows_cuda.is_supported(mx.zeros((rows, 1, 64), mx.bfloat16), weight) for rows in (33, 128, 129)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("of_rows", "of_weights"),
    [(mx.float32, mx.float32), (mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)],
)
def test_other_and_mixed_dtypes_are_the_library_s(of_rows, of_weights):
    assert not few_rows_cuda.is_supported(mx.zeros((2, 64), of_rows), Weight((mx.zeros((48, 64), of_weights),)))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rows_of_another_size_are_the_library_s_which_names_it(bits: int):
    """A family is asked for its rope positions by wrong ones, which gave attention three times as many features."""
    layer = nn.Linear(64, 48, bias=False)
    layer.set_dtype(mx.bfloat16)
    weight = Weight.of(layer if bits == UNQUANTIZED else nn.QuantizedLinear.from_linear(layer, 32, bits))
    assert weight is not None and weight.num_inputs == 64
    assert few_rows_cuda.is_supported(mx.zeros((1, 64), mx.bfloat16), weight)
    assert not few_rows_cuda.is_supported(mx.zeros((1, 192), mx.bfloat16), weight)


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_kernel_does_not_take_is_computed_by_the_library(bias):
    layer, embedding, x = nn.Linear(64, 48, bias=bias), nn.Embedding(48, 64), mx.random.normal((2, 1, 64))
    assert mx.array_equal(few_rows_cuda.linear(layer, x), layer(x))
    assert mx.array_equal(few_rows_cuda.as_linear(embedding, x), embedding.as_linear(x))


def test_what_several_layers_compute_without_the_kernel_is_what_they_compute_alone():
    gate, up, x, to = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False), mx.ones((2, 1, 64)), mx.ones(48)
    first, second = few_rows_cuda.products((gate, up), x)
    assert mx.array_equal(first, gate(x)) and mx.array_equal(second, up(x))
    assert mx.allclose(few_rows_cuda.gated(gate, up, x), nn.silu(gate(x)) * up(x))
    assert mx.array_equal(few_rows_cuda.added(to, gate, x), to + gate(x))


@pytest.fixture
def on_cpu(cuda_on_cpu, monkeypatch):
    """The kernels of few_rows_cuda and quantized_cuda on a CPU, as they are installed on CUDA."""
    monkeypatch.setattr(nn.Linear, "__call__", few_rows_cuda.linear)
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", quantized_cuda.linear)


CASES = [
    (16, 192, {"group_size": 64, "bits": 4}, "narrow"),
    (20, 160, {}, "wide"),
    (3, 576, {"group_size": 64, "bits": 4}, "wide"),
    (20, 256, {"group_size": 128, "bits": 4}, "wide"),
    (20, 96, {"group_size": 32, "bits": 4}, "narrow"),
    (9, 320, {"group_size": 64, "bits": 8}, "wide"),
    (32, 128, {"group_size": 128, "bits": 8}, "narrow"),
    (16, 608, {}, "wide"),
    (16, 608, {}, "narrow"),
    (3, 96, {}, "output layer"),
    (40, 544, {"group_size": 32, "bits": 4}, "narrow"),
    (70, 352, {"group_size": 32, "bits": 8}, "narrow"),
    (33, 1152, {"group_size": 128, "bits": 4}, "narrow"),
]
"""Rows, features, quantization, and the kind of weights whose tiles the kernel has."""


@pytest.mark.parametrize(
    "case",
    some_at_night(
        CASES,
        [*CASES[:2], CASES[-3]],
        "the gate runs the kernel with weights of 4 and 16 bits, with one, two and four row tiles",
    ),
)
def test_the_kernel_s_source_computes_products_of_all_forms(on_cpu, monkeypatch, case):
    num_rows, size, quantization, kind = case
    if kind != "narrow":
        monkeypatch.setattr(few_rows_cuda, "NARROW", 8)
    if kind == "output layer":
        monkeypatch.setattr(few_rows_cuda, "MANY_OUTPUTS", 36)
    assert few_rows_error(num_rows, size, 36, quantization) < 2e-2


def test_the_kernel_for_many_rows_copies_arrays_at_any_place(on_cpu, monkeypatch):
    source, aligned = row_tiles_kernel.SOURCE, "const bool aligned = "
    assert source.count(aligned) == 1
    monkeypatch.setattr(row_tiles_kernel, "SOURCE", source.replace(aligned, f"{aligned}false && "))
    assert few_rows_error(40, 544, 36, {"group_size": 32, "bits": 4}) < 2e-2


def test_the_number_of_outputs_chooses_the_blocks_that_multiply_many_rows():
    def outputs_of_block(*form):
        return many_rows.of_weights(4, *form).num_outputs

    assert [outputs_of_block(num, False) for num in (36, 5120, 12672, 12673, 16384)] == [32, 32, 32, 128, 128]
    assert [outputs_of_block(num, True) for num in (12672, 12673, 34816)] == [32, 64, 64]


@pytest.mark.parametrize("processors", [0, 132])
def test_many_rows_are_multiplied_by_blocks_of_any_size(on_cpu, monkeypatch, processors):
    asked, of_weights = [], many_rows.of_weights
    monkeypatch.setattr(many_rows, "of_weights", lambda *form: asked.append(of_weights(*form)) or asked[-1])
    monkeypatch.setattr(many_rows, "PROCESSORS", processors)
    assert few_rows_error(40, 544, 36, {"group_size": 32, "bits": 4}) < 2e-2
    assert {one.num_outputs for one in asked} == ({32} if processors else {64, 128})


def test_a_row_of_more_numbers_than_its_block_has_fetched_ahead_is_multiplied_by_all(on_cpu, monkeypatch):
    """Weights of 8 bits, of which eight warps fetch 1024 numbers ahead."""
    monkeypatch.setattr(few_rows_cuda, "NARROW", 0)
    layer = nn.QuantizedLinear.from_linear(nn.Linear(1088, 12, bias=False), group_size=64, bits=8)
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((3, 1088), key=mx.random.key(0)).astype(mx.bfloat16)
    weight = Weight.of(layer)
    assert weight is not None and few_rows_cuda.is_supported(x, weight)
    scales, biases = layer.scales.astype(mx.float32), layer["biases"].astype(mx.float32)
    expected = x.astype(mx.float32) @ mx.dequantize(layer.weight, scales, biases, group_size=64, bits=8).T
    found = few_rows_cuda.product(x, weight).astype(mx.float32)
    assert mx.allclose(found, expected, rtol=0, atol=0.02 * float(mx.abs(expected).max()))


@pytest.mark.parametrize("quantization", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 8}])
def test_a_quantized_weight_is_expanded_by_the_kernel_s_source(on_cpu, quantization):
    layer = nn.QuantizedLinear.from_linear(nn.Linear(192, 40, bias=False), **quantization)
    layer.set_dtype(mx.bfloat16)
    expanded = quantized_cuda.expanded(layer, mx.bfloat16).astype(mx.float32)
    scales, biases = layer.scales.astype(mx.float32), layer["biases"].astype(mx.float32)
    exact = mx.dequantize(layer.weight, scales, biases, **quantization)
    assert mx.allclose(expanded, exact, rtol=0, atol=float(mx.abs(exact).max()) / 128)
    x = mx.random.normal((few_rows_cuda.MAX_QUANTIZED_ROWS + 1, 1, 192)).astype(mx.bfloat16)
    assert mx.array_equal(quantized_cuda.linear(layer, x), x @ quantized_cuda.expanded(layer, mx.bfloat16).T)


def test_weights_of_an_output_layer_and_other_forms_are_expanded_for_many_rows_alone(on_cpu, monkeypatch):
    def expanded(module, rows):
        found = []
        monkeypatch.setattr(
            quantized_cuda, "expanded", lambda layer, dtype: found.append(layer) or mx.zeros((40, 64), dtype)
        )
        quantized_cuda.product(module, mx.zeros((rows, 64), mx.bfloat16))
        return bool(found)

    few, many = few_rows_cuda.MAX_QUANTIZED_ROWS + 1, quantized_cuda.MANY_ROWS
    layer = nn.Linear(64, 40, bias=False)
    layer.set_dtype(mx.bfloat16)
    affine, other = layer.to_quantized(64, 4), layer.to_quantized(32, 4, "mxfp4")
    assert [expanded(affine, rows) for rows in (few, many)] == [True, True]
    assert [expanded(other, rows) for rows in (few, many)] == [False, True]
    assert quantized_cuda.most_expanded_bytes(nn.Sequential(affine, other)) == 2 * 64 * 40
    assert quantized_cuda.most_expanded_bytes(nn.Sequential(other)) == 0
    monkeypatch.setattr(few_rows_cuda, "MANY_OUTPUTS", 40)
    assert [expanded(affine, rows) for rows in (few, many)] == [False, True]
    assert quantized_cuda.most_expanded_bytes(nn.Sequential(affine)) == 0


def test_only_layers_of_like_weights_are_computed_together(on_cpu):
    x = mx.zeros((2, 128), mx.bfloat16)
    layers = [nn.Linear(128, 32, bias=False) for _ in range(4)]
    layers = [
        layers[0],
        *(layers[1].to_quantized(group_size, bits) for group_size, bits in ((64, 4), (32, 4), (64, 8))),
    ]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    for layer in layers:
        assert few_rows_cuda.weights_of_one_kernel(x, [layer, layer]) is not None
    for first, second in itertools.combinations(layers, 2):
        assert few_rows_cuda.weights_of_one_kernel(x, [first, second]) is None


@pytest.mark.parametrize("form", [(64, 3, "affine"), (64, 6, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8")])
def test_other_quantizations_are_the_library_s(form):
    assert Weight.of(nn.Linear(128, 32, bias=False).to_quantized(*form)) is None
