"""Products of few rows in halves: the numbers of the whole product, and the tokens of a model without halves."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.worker import blas, split_products
from engine.worker.split_products import MAX_ROWS, MAX_TOKENS, MIN_SIZE, MIN_TILED_SIZE, SplitEmbedding, SplitLinear
from tests.engine.worker.test_burst import alone, decode, rows_of, start_together
from tests.support.cold_runner import load_cold

SHAPES = [(1024, 576), (1000, 333), (577, 1536), (2, 8), (3, 5)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16, 40, 63, MAX_ROWS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_are_multiplied_in_halves_with_the_result_of_the_whole(shape: tuple[int, int], bias: bool, num_rows):
    num_outputs, num_inputs = shape
    layer = nn.Linear(num_inputs, num_outputs, bias=bias)
    x = mx.random.normal((num_rows, 1, num_inputs))
    expected = np.array(layer(x))
    assert split_products.install(nn.Sequential(layer), min_size=1) == 1
    assert type(layer) is SplitLinear and layer(x).shape == (num_rows, 1, num_outputs)
    np.testing.assert_allclose(np.array(layer(x)), expected, atol=1e-5 * num_inputs**0.5)


@pytest.mark.parametrize("num_rows", [1, 2, 16, 40])
def test_smaller_weights_are_multiplied_in_tiles_by_one_stream(num_rows: int):
    layer = nn.Linear(333, 576)
    assert MIN_SIZE > layer.weight.size >= MIN_TILED_SIZE
    x = mx.random.normal((num_rows, 333))
    expected = np.array(layer(x))
    assert split_products.install(nn.Sequential(layer)) == 0
    assert (type(layer) is SplitLinear) == blas.has_small_kernels()
    np.testing.assert_allclose(np.array(layer(x)), expected, atol=1e-4)


def test_more_rows_and_other_dtypes_are_multiplied_by_the_whole_weight():
    layer = nn.Linear(64, 256)
    few = mx.random.normal((1, 2, 64))
    many = [mx.random.normal(shape) for shape in ((1, MAX_TOKENS + 1, 64), (MAX_ROWS + 1, 1, 64), (MAX_ROWS + 1, 64))]
    whole, low = [np.array(layer(x)) for x in many], np.array(layer(few.astype(mx.bfloat16)).astype(mx.float32))
    split_products.install(nn.Sequential(layer), min_size=1)
    assert all(np.array_equal(np.array(layer(x)), y) for x, y in zip(many, whole, strict=True))
    assert np.array_equal(np.array(layer(few.astype(mx.bfloat16)).astype(mx.float32)), low)


def test_an_embedding_as_output_layer_is_split_and_still_embeds():
    embedding = nn.Embedding(1000, 64)
    x, ids = mx.random.normal((3, 1, 64)), mx.array([[1, 999]])
    expected, embedded = np.array(embedding.as_linear(x)), np.array(embedding(ids))
    split_products.install(nn.Sequential(embedding), min_size=1)
    assert type(embedding) is SplitEmbedding
    np.testing.assert_allclose(np.array(embedding.as_linear(x)), expected, atol=1e-4)
    assert np.array_equal(np.array(embedding(ids)), embedded)


def test_a_split_layer_keeps_its_parameters_and_takes_no_more_memory():
    layer = nn.Linear(1024, 1024)
    mx.eval(layer.parameters())
    before, names = mx.get_active_memory(), set(layer.parameters())
    split_products.install(nn.Sequential(layer), min_size=1)
    assert set(layer.parameters()) == names and mx.get_active_memory() == before


def test_small_low_precision_and_quantized_weights_are_left_alone():
    quantized = nn.QuantizedLinear(2048, 2048)
    low = nn.Linear(2048, 2048)
    low.set_dtype(mx.bfloat16)
    assert split_products.install(nn.Sequential(nn.Linear(8, MIN_TILED_SIZE // 8 - 1), quantized, low), None) == 0
    assert type(low) is nn.Linear and type(quantized) is nn.QuantizedLinear


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_model_with_split_weights_gives_the_same_tokens_alone_in_a_batch_and_with_drafts(tiny_model, compile):
    path = tiny_model(layers=2, interval=2, agree=0.3)
    runner = load_cold(EngineConfig(model=str(path), compile=compile))
    rows = rows_of()
    expected = alone(runner, rows)
    runner.reset()
    model = runner._model
    assert split_products.install(model.module.language_model, model.proposers["mtp"].module, min_size=1) > 10
    assert alone(runner, rows) == expected
    start_together(runner, rows)
    assert decode(runner, rows, 2) == expected


@pytest.mark.skipif(blas.preload().source == "mlx bundled", reason="CPU products of this MLX are not OpenBLAS's")
def test_tiles_are_used_where_openblas_has_kernels_for_them():
    tile = split_products._tile(16, 24576, 576)
    assert tile == (64 if blas.has_small_kernels() else None)
    assert split_products._tile(1, 24576, 576) is None and split_products._tile(MAX_ROWS, 1000, 576) is None


@pytest.mark.parametrize(("num_cores", "is_split"), [(1, False), (2, True), (3, True), (4, False), (16, False)])
def test_products_are_split_only_where_a_step_has_one_blas_thread_and_a_core_to_spare(monkeypatch, num_cores, is_split):
    info = blas.BlasInfo("openblas wheel", "", "")
    monkeypatch.setattr(blas, "_preload", lambda: (info, lambda num_threads: None))
    monkeypatch.setattr(blas, "_num_cores", lambda: num_cores)
    assert blas.has_idle_core() == is_split
    monkeypatch.setattr(blas, "_preload", lambda: (info, None))
    assert not blas.has_idle_core(), "the user has set OPENBLAS_NUM_THREADS"
