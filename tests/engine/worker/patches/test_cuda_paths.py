"""Every family gets the library's tokens where CUDA's kernels replace its products, whatever it multiplies.

On a CPU in float32: products stand for the kernels of few rows and of experts, whose sources other tests run. So the
forwards that call them are tested with all families: which layers they merge, what they leave to the library.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import switch_layers as text_layers
from mlx_vlm.models import switch_layers

from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.patches import experts_cuda, few_rows_cuda, quantized_cuda
from engine.worker.patches.few_rows_cuda import UNQUANTIZED, Weight
from engine.worker.patches.few_rows_kernel import NAMES, Form, PairGrouping
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import conversation, load, make

LOGPROB_TOLERANCE = 3e-4
GATE = ("qwen2_moe", "gpt_oss", "deepseek_v3", "longcat_flash", "ernie4_5_moe_vl", "bailing_moe_v3", "qwen3_moe 4-bit")
REPLACED = (
    (nn.Linear, "__call__"),
    (nn.Embedding, "as_linear"),
    (nn.QuantizedLinear, "__call__"),
    (nn.QuantizedEmbedding, "as_linear"),
    (switch_layers.SwitchGLU, "__call__"),
    (text_layers.SwitchGLU, "__call__"),
)


class Calls:
    """Stand for the kernels, and count how often each was called.

    Attributes:
        few_rows: Calls of few_rows_cuda.
        experts: Calls of experts_cuda.
    """

    def __init__(self) -> None:
        self.few_rows = self.experts = 0

    def multiply(
        self, x: mx.array, weights: Sequence[Weight], *others: mx.array, form: Form = "plain", norm: Any = None
    ) -> list[mx.array]:
        """Stand for few_rows_cuda._multiply, which reads beyond rows that are shorter than the weights'."""
        self.few_rows += 1
        assert all(x.shape[-1] == weight.num_inputs for weight in weights)
        x = x if norm is None else norm(x)
        products = [x @ numbers(weight.arrays, weight.bits, x.shape[-1]).T for weight in weights]
        if form == "gated":
            return [nn.silu(products[0]) * products[1]]
        return [others[0] + products[0]] if form == "added" else products

    def multiply_experts(
        self,
        x: mx.array,
        layers: Sequence[Any],
        others: Sequence[mx.array],
        pairs: Any,
        form: Form,
        grouping: PairGrouping,
        eps: float | None = None,
    ) -> mx.array:
        """Stand for experts_cuda._multiply, with pairs that are not grouped."""
        self.experts += 1
        assert not pairs.with_shared and not others and eps is None, "only Qwen3.5's layers ask for more"
        assert all(x.shape[-1] == layer.input_dims for layer in layers)
        [experts] = pairs.where
        rows = mx.repeat(x, pairs.share, axis=0) if grouping == "gather" else x
        products = []
        for layer in layers:
            arrays = experts_cuda._arrays(layer)
            weight = numbers([array[experts] for array in arrays], experts_cuda._bits(layer), x.shape[-1])
            products.append((weight @ rows[:, :, None])[..., 0])
        return nn.silu(products[0]) * products[1] if form == "gated" else products[0]


def numbers(arrays: Sequence[mx.array], bits: int, num_inputs: int) -> mx.array:
    """Return the numbers of a weight, those of whose arrays few_rows_cuda.Weight says."""
    if bits == UNQUANTIZED:
        return arrays[0]
    return mx.dequantize(*arrays, group_size=num_inputs // arrays[1].shape[-1], bits=bits)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Calls]:
    """Return a function that installs the forwards of a CUDA device, until the end of the test."""

    def installed() -> Calls:
        calls = Calls()
        for owner, name in REPLACED:
            monkeypatch.setattr(owner, name, getattr(owner, name))
        monkeypatch.setitem(NAMES, mx.float32, "f32")
        monkeypatch.setattr(few_rows_cuda, "_multiply", calls.multiply)
        monkeypatch.setattr(quantized_cuda, "_weight", lambda module, dtype: None)
        monkeypatch.setattr(experts_cuda, "_multiply", calls.multiply_experts)
        monkeypatch.setattr(experts_cuda, "_grouped", lambda experts, *of: [experts])
        with monkeypatch.context() as device:
            device.setattr(mx, "device_info", lambda *of: {"compute_capability_major": 9})
            for patch in (few_rows_cuda, quantized_cuda, experts_cuda):
                patch.install()
        return calls

    return installed


@pytest.mark.parametrize(
    "family",
    some_at_night(FAMILIES, GATE, "the gate has each kind of experts, of rope positions, and quantized weights"),
)
def test_a_family_gets_the_library_s_tokens_from_the_forwards_of_a_cuda_device(
    family: str, tmp_path: Path, install: Callable[[], Calls]
):
    turns = conversation(load(make(tmp_path, FAMILIES[family])))
    calls = install()
    runner = load_cold(EngineConfig.model_validate({"model": str(tmp_path), "expand_quantized_weights": "off"}))
    driver = Driver(runner, EngineConfig(prompt_lookup="off", mtp="off"))
    requests = [
        EngineRequest(
            name,
            np.array(turn.token_ids, np.int32),
            SamplingParams(len(turn.answer.tokens), temperature=0.0, logprobs=0),
            (),
        )
        for name, turn in turns.items()
    ]
    driver.run({0: requests})
    for name, turn in turns.items():
        assert driver.tokens[name] == turn.answer.tokens, driver.errors[name]
        logprobs = [one.logprob for chunk in driver.chunks[name] for one in chunk.logprobs]
        np.testing.assert_allclose(logprobs, turn.answer.logprobs, atol=LOGPROB_TOLERANCE)
    mode = (FAMILIES[family].quantization or {}).get("mode", "affine")
    assert calls.few_rows or mode != "affine", "other quantizations are the library's"
