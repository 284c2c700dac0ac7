"""Compares single kernels with plain references, by name: those that only some devices have, and their counterparts.

Each check returns a KernelFigure, or why it does not apply to this device.
"""

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.qwen3_5 import gated_delta, language
from mlx_vlm.models.qwen3_5.language import Qwen3_5MLP
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding
from mlx_vlm.models.switch_layers import SwitchGLU

from engine.worker import cuda_kernel, devices
from engine.worker.cuda_kernel import CudaKernel
from engine.worker.cursor import Cursor
from engine.worker.decoder_layer_checks import decoder_layers, same_bits
from engine.worker.kernel_figure import BFLOAT16_LIMIT, LIMIT, KernelFigure, error_of, float64_of
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.patches import (
    convolutions,
    experts_cuda,
    few_rows_cuda,
    prompt_attention_cuda,
    qwen35_moe_cuda,
    step_attention_cuda,
)

SLOTS = 4096
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "affine 4-bit": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine 8-bit": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def rotary_positions() -> KernelFigure:
    """Rotate queries by positions [B, L] and [3, B, L]; on Metal by one fused kernel, elsewhere by several."""
    rope, plain = _rope(), _rope()
    plain.fused_apply = False
    q, k = (mx.random.normal((2, heads, 5, 64), key=mx.random.key(heads)) for heads in (4, 2))
    own = mx.arange(10, dtype=mx.int32).reshape(2, 5) * 7
    axes = mx.stack([own, own // 2, own + 3])
    errors = [error_of(rope.apply_rotary(q, k, own)[0], _rotated(np.array(q), np.array(own)))]
    errors += [error_of(rope.apply_rotary(q, k, mx.broadcast_to(own, (3, 2, 5)))[0], rope.apply_rotary(q, k, own)[0])]
    errors += [error_of(rope.apply_rotary(q, k, axes)[i], plain.apply_rotary(q, k, axes)[i]) for i in (0, 1)]
    return KernelFigure(max(errors), LIMIT, "fused" if rope.fused_apply else "not fused on this device")


def _rope() -> Any:
    return MRoPERotaryEmbedding(32, rope_parameters={"mrope_section": [6, 5, 5]}, style="interleaved")


def _rotated(q: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotate the first 32 of each head's numbers, in float64."""
    angles = positions[:, None, :, None] * (10000.0 ** (-np.arange(0, 32, 2) / 32))
    cos, sin = np.cos(angles), np.sin(angles)
    first, second, rest = q[..., :16].astype(np.float64), q[..., 16:32].astype(np.float64), q[..., 32:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def gated_delta_rule() -> KernelFigure:
    """Compute one token and a prompt of four rows by the delta rule, against token after token in float64."""
    errors = []
    for length in (1, 5, 40):
        q, k, v, a, b, decay, bias = _delta_inputs(length)
        state = mx.random.normal((4, 4, 32, 32), key=mx.random.key(9))
        y, last = gated_delta.gated_delta_update(q, k, v, a, b, decay, bias, state=state)[:2]
        expected, states = _delta_rule(q, k, v, a, b, decay, bias, state)
        errors += [error_of(y, expected), error_of(last, states[-1])]
    return KernelFigure(max(errors), LIMIT, f"{devices.device_kind()} kernels")


def gated_delta_states() -> KernelFigure:
    """Compute the tokens of a verification, with the state after each, against token after token in float64."""
    q, k, v, a, b, decay, bias = _delta_inputs(4)
    state = mx.random.normal((4, 4, 32, 32), key=mx.random.key(9))
    y, last, states = gated_delta.gated_delta_update_with_states(q, k, v, a, b, decay, bias, state)
    expected, expected_states = _delta_rule(q, k, v, a, b, decay, bias, state)
    errors = [
        error_of(y, expected),
        error_of(last, expected_states[-1]),
        error_of(states, np.stack(expected_states, 1)),
    ]
    return KernelFigure(max(errors), LIMIT, f"{devices.device_kind()} kernels")


def _delta_inputs(length: int) -> tuple[mx.array, ...]:
    """Return q, k [4, L, 2, 32], v [4, L, 4, 32], a, b [4, L, 4], A_log and dt_bias [4]."""
    shapes = ((4, length, 2, 32), (4, length, 2, 32), (4, length, 4, 32), (4, length, 4), (4, length, 4), (4,), (4,))
    drawn = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    q, k, *rest = drawn
    return q / 32, k / mx.linalg.norm(k, axis=-1, keepdims=True), *rest


def _delta_rule(*inputs: mx.array) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return outputs [B, L, H, D] and the state [B, H, D, D] after each token, in float64."""
    q, k, v, a, b, decay, bias, state = (np.array(one).astype(np.float64) for one in inputs)
    q, k = (np.repeat(one, v.shape[2] // one.shape[2], axis=2) for one in (q, k))
    g, beta = np.exp(-np.exp(decay) * np.logaddexp(0, a + bias)), 1 / (1 + np.exp(-b))
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        seen = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhv,bhk->bhvk", (v[:, t] - seen) * beta[:, t, :, None], k[:, t])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        states.append(state)
    return np.stack(outputs, 1), states


def few_rows() -> KernelFigure:
    """Apply layers to 1 to 33 rows in bfloat16, a few in float16, against float64; CUDA has a kernel for up to 32."""
    errors = [
        few_rows_error(num_rows, size, num_outputs, {})
        for num_rows, size, num_outputs in product((1, 2, 7, 16, 17, 32, 33), (512, 96), (1024, 100))
    ]
    errors += [few_rows_error(num_rows, 96, few_rows_cuda.NARROW + 100, {}) for num_rows in (5, 20)]
    errors += [few_rows_error(5, 96, 100, {}, mx.float16)]
    return KernelFigure(max(errors), 2 * BFLOAT16_LIMIT, f"{devices.device_kind()} kernels")  # some round twice


def quantized_rows() -> KernelFigure | str:
    """Apply layers of 4 and 8 bits to 1 to 300 rows, in bfloat16 and a few in float16, against float64."""
    if devices.device_kind() != "cuda":
        return "Orchard's kernels for weights of 4 and 8 bits are for CUDA alone"
    errors = [
        few_rows_error(num_rows, size, num_outputs, {"group_size": group_size, "bits": bits})
        for bits, group_size, size in ((4, 64, 512), (4, 32, 96), (4, 128, 512), (8, 64, 512))
        for num_rows, num_outputs in product((1, 7, 16, 17, 33, 100, 300), (1024, 100))
    ]
    four: dict[str, Any] = {"group_size": 32, "bits": 4}
    errors += [few_rows_error(num_rows, 96, few_rows_cuda.NARROW + 100, four) for num_rows in (5, 20)]
    errors += [few_rows_error(100, 96, 13000, four)]  # more outputs than small blocks compute
    errors += [few_rows_error(num_rows, 96, 100, four, mx.float16) for num_rows in (5, 100)]
    return KernelFigure(max(errors), 2 * BFLOAT16_LIMIT, f"{devices.device_kind()} kernels")


def few_rows_error(
    num_rows: int, size: int, num_outputs: int, quantization: dict[str, Any], dtype: mx.Dtype = mx.bfloat16
) -> float:
    """Return the largest error of layers [size, num_outputs] alone and together, behind a norm, with a gate, added."""
    layers: list[Any] = [nn.Linear(size, num, bias=False) for num in (num_outputs, num_outputs, 36)]
    layers.append(nn.Linear(size, num_outputs))
    for i, layer in enumerate(layers):
        layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(i)) / size**0.5
    if quantization:
        layers = [nn.QuantizedLinear.from_linear(layer, **quantization) for layer in layers]
    for layer in layers:
        layer.set_dtype(dtype)
    *layers, biased = layers
    x = mx.random.normal((num_rows, 1, size), key=mx.random.key(num_rows)).astype(dtype)
    to = mx.random.normal((num_rows, 1, num_outputs), key=mx.random.key(0)).astype(dtype)
    first, second, third, other = (float64_of(x) @ _exact_weight(layer).T for layer in (*layers, biased))
    norm = nn.RMSNorm(size)
    norm.weight = mx.random.normal((size,), key=mx.random.key(1)).astype(dtype)
    normed = float64_of(x) / np.sqrt((float64_of(x) ** 2).mean(-1, keepdims=True) + norm.eps) * float64_of(norm.weight)
    gate, up = (normed @ _exact_weight(layer).T for layer in layers[:2])
    computed = {
        "alone": (biased(x), other + float64_of(biased.bias)),
        "gated": (few_rows_cuda.gated(layers[0], layers[1], x), first / (1 + np.exp(-first)) * second),
        "added": (few_rows_cuda.added(to, layers[0], x), float64_of(to) + first),
        "normed": (few_rows_cuda.products(layers[1:], x, norm)[0], up),
        "normed and gated": (few_rows_cuda.gated(layers[0], layers[1], x, norm), gate / (1 + np.exp(-gate)) * up),
    }
    several = zip(few_rows_cuda.products(layers, x), (first, second, third), strict=True)
    return max(error_of(got, expected) for got, expected in (*computed.values(), *several))


def experts() -> KernelFigure | str:
    """Choose experts of 4, 8 and 16 bits for 1 to 300 tokens, apply and weigh them, against float64: CUDA's kernels."""
    if devices.device_kind() != "cuda":
        return "Orchard's kernels for experts are for CUDA alone"
    four, eight = ({"group_size": 64, "bits": bits} for bits in (4, 8))
    errors = [experts_error(num_tokens, 40, (1024, 512), four) for num_tokens in (1, 5, 20, 300)]
    errors += [experts_error(num_tokens, 40, (1024, 512), form) for num_tokens in (1, 20) for form in (eight, {})]
    errors += [experts_error(300, 40, (1024, 512), eight)]
    errors += [experts_error(40, 8, (160, 96), {"group_size": 32, "bits": 4})]
    errors += [experts_error(300, 40, (1024, 512), four, mx.float16)]
    return KernelFigure(max(errors), 2 * BFLOAT16_LIMIT, f"{devices.device_kind()} kernels")


def experts_error(
    num_tokens: int,
    num_experts: int,
    sizes: tuple[int, int],
    quantization: dict[str, Any],
    dtype: mx.Dtype = mx.bfloat16,
) -> float:
    """Return the largest error of four experts of each token and a shared one, alone, behind a norm, and of their sum.

    sizes: Numbers of a token, and of an expert between its two products.
    """
    size, inner = sizes
    module, shared, wide = SwitchGLU(size, inner, num_experts), Qwen3_5MLP(size, inner), Qwen3_5MLP(size, 2 * inner)
    modules: list[Any] = [module, shared, wide]
    for one in modules:
        for i, layer in enumerate((one.gate_proj, one.up_proj, one.down_proj)):
            layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(i)) / layer.weight.shape[-1] ** 0.5
        if quantization:
            nn.quantize(one, **quantization)
        one.set_dtype(dtype)
    x, to = (mx.random.normal((num_tokens, size), key=mx.random.key(i)).astype(dtype) for i in range(2))
    logits = mx.random.normal((num_tokens, num_experts), key=mx.random.key(3)).astype(dtype)
    gates = mx.random.normal((num_tokens,), key=mx.random.key(4)).astype(dtype)
    norm = nn.RMSNorm(size)
    norm.weight = mx.random.normal((size,), key=mx.random.key(5)).astype(dtype)
    chosen = np.argsort(-float64_of(logits), axis=-1, kind="stable")[:, :4]
    shares = np.exp(np.take_along_axis(float64_of(logits), chosen, -1))
    indices, scores = qwen35_moe_cuda.choice(logits, 4, True)
    if not np.array_equal(indices, chosen):
        return float("inf")
    normed = float64_of(x) / np.sqrt((float64_of(x) ** 2).mean(-1, keepdims=True) + norm.eps) * float64_of(norm.weight)
    y, y_of_normed = (_of_experts(module, tokens, chosen) for tokens in (float64_of(x), normed))
    of_all, of_all_normed = (_of_experts(shared, tokens, None) for tokens in (float64_of(x), normed))
    found = experts_cuda.with_shared(module, shared, x, indices)
    sums = float64_of(to) + (y * (shares / shares.sum(-1, keepdims=True))[..., None]).sum(1)
    sums += of_all / (1 + np.exp(-float64_of(gates)))[:, None]
    compared = [
        (experts_cuda.experts(module, x, indices), y),
        (found, np.concatenate([y.reshape(-1, size), of_all])),
        (experts_cuda.with_shared(module, wide, x, indices)[-num_tokens:], float64_of(wide(x))),
        (
            experts_cuda.with_shared(module, shared, x, indices, norm),
            np.concatenate([y_of_normed.reshape(-1, size), of_all_normed]),
        ),
        (qwen35_moe_cuda.total(to, found, scores, gates), sums),
        (qwen35_moe_cuda.choice(logits, 4, False)[1], shares / np.exp(float64_of(logits)).sum(-1, keepdims=True)),
    ]
    return max(error_of(got, expected) for got, expected in compared)


def _of_experts(module: Any, x: np.ndarray, chosen: np.ndarray | None) -> np.ndarray:
    """Return what the experts [N, k] that are chosen give for tokens [N, in], or an MLP, in float64."""
    gate, up, down = (_exact_weight(layer) for layer in (module.gate_proj, module.up_proj, module.down_proj))
    if chosen is None:
        gated, upper = x @ gate.T, x @ up.T
        return (gated / (1 + np.exp(-gated)) * upper) @ down.T
    gated, upper = (np.einsum("ni,nkoi->nko", x, weight[chosen]) for weight in (gate, up))
    return np.einsum("nki,nkoi->nko", gated / (1 + np.exp(-gated)) * upper, down[chosen])


def step_attention() -> KernelFigure | str:
    """Attend to rows of several lengths, one to four tokens each, against float64."""
    if devices.device_kind() != "cuda":
        return "Orchard's attention of decode steps is for CUDA alone"
    errors = []
    for length, heads, size, slots in product((1, 4), (8, 12), (64, 256), (512, 1280)):
        starts = mx.array([0, 7, 300, slots - length], mx.int32)
        keys, values = (mx.random.normal((4, 2, slots, size), key=mx.random.key(i)) for i in (0, 1))
        queries = mx.random.normal((4, length, heads, size), key=mx.random.key(2))
        gates = mx.random.normal((4, length, heads * 2 * size), key=mx.random.key(3))
        cache = BatchKVLayer(keys, values, Cursor(starts, slots))
        got = step_attention_cuda.attend(queries, gates, cache, size**-0.5)
        k, v = (np.repeat(float64_of(one), heads // 2, axis=1) for one in (keys, values))
        scores = np.einsum("blhd,bhsd->blhs", float64_of(queries), k) * size**-0.5
        own = np.array(starts)[:, None] + np.arange(length)
        scores[np.broadcast_to((np.arange(slots) > own[..., None])[:, :, None], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("blhs,bhsd->blhd", weights / weights.sum(-1, keepdims=True), v)
        gated = seen / (1 + np.exp(-float64_of(gates).reshape(4, length, heads, 2, size)[:, :, :, 1]))
        errors.append(error_of(got, gated.reshape(got.shape)))
    return KernelFigure(max(errors), LIMIT, "cuda kernels")


def prompt_attention() -> KernelFigure | str:
    """Attend with a chunk behind earlier tokens, a first chunk and a masked one, in bfloat16 against float64."""
    if mx.fast.scaled_dot_product_attention is not prompt_attention_cuda.attention:
        return "Orchard's attention of prompts is for CUDA alone, from compute capability 8 on"
    errors = []
    for (length, num_keys), size in product(((64, 64), (100, 333), (256, 1100)), (192, 256)):
        q = mx.random.normal((2, 6, length, size), key=mx.random.key(0)).astype(mx.bfloat16)
        k, v = (mx.random.normal((2, 2, 2 * num_keys, size), key=mx.random.key(i)).astype(mx.bfloat16) for i in (1, 2))
        k, v = k[:, :, :num_keys], v[:, :, :num_keys]
        causal = mx.arange(num_keys) <= num_keys - length + mx.arange(length)[:, None]
        some = (mx.random.uniform(shape=(2, 1, length, num_keys), key=mx.random.key(3)) < 0.5) | causal
        for mask, own in (("causal", causal), (None, mx.ones_like(causal)), (some, some)):
            got = prompt_attention_cuda.attend(q, k, v, size**-0.5, mask)
            of_heads = [np.repeat(float64_of(one), 3, axis=1) for one in (k, v)]
            scores = np.where(np.array(own), float64_of(q) @ of_heads[0].swapaxes(-1, -2) * size**-0.5, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            errors.append(error_of(got, weights / weights.sum(-1, keepdims=True) @ of_heads[1]))
    return KernelFigure(max(errors), BFLOAT16_LIMIT, "cuda kernels")


def depthwise_convolution() -> KernelFigure:
    """Convolve each channel of two rows by itself, against float64."""
    x = mx.random.normal((2, 43, 96), key=mx.random.key(0))
    weight = mx.random.normal((96, 4, 1), key=mx.random.key(1))
    own, taps = float64_of(x), float64_of(weight)[..., 0]
    expected = sum(own[:, i : i + 40] * taps[:, i] for i in range(4))
    return KernelFigure(
        error_of(convolutions.depthwise(x, weight), expected), LIMIT, f"{devices.device_kind()} kernels"
    )


def quantized_head() -> KernelFigure:
    """Apply quantized output layers to one and several rows and tokens, against the product of what they stand for.

    A device may lack the kernels of a mode, but not of all: then none works, and the figure is wrong.
    """
    errors: dict[str, float] = {}
    lacking = []
    for name, quantization in QUANTIZATIONS.items():
        try:
            errors[name] = _head_error(quantization)
        except (RuntimeError, ValueError) as error:
            lacking.append(f"not on this device: {name} ({error})")
    if not errors:
        return KernelFigure(float("inf"), LIMIT, f"no quantized kernel works: {'; '.join(lacking)}")
    worst = max(errors, key=lambda name: errors[name])
    return KernelFigure(errors[worst], LIMIT, "; ".join([f"worst: {worst}", *lacking]))


def _head_error(quantization: dict[str, Any]) -> float:
    """Return the largest error of one mode, over several numbers of rows and tokens."""
    dense = nn.Linear(512, 1024, bias=False)
    dense.weight = mx.random.normal((1024, 512), key=mx.random.key(0)) / 16
    head = nn.QuantizedLinear.from_linear(dense, **quantization)
    weight = mx.dequantize(head.weight, head.scales, head.get("biases"), **quantization)
    errors = []
    for num_rows, num_tokens in ((1, 1), (4, 1), (1, 4), (4, 4), (16, 1)):
        x = mx.random.normal((num_rows, num_tokens, 512), key=mx.random.key(1))
        exact = np.array(x, np.float64) @ np.array(weight.astype(mx.float32), np.float64).T
        errors.append(error_of(head(x), exact))
    return max(errors)


def exact_verifier_head() -> KernelFigure | str:
    """Apply the library's exact verifier to several rows and tokens: the bits of one row and token at a time.

    Its kernels take layers in bfloat16 alone, one at a time or several that share their input. They must also give the
    products of what the weights stand for.
    """
    if devices.device_kind() != "metal":
        return "the library's exact verifier has kernels for Metal alone"
    verifier, worst = language._EXACT_SPECULATIVE_VERIFIER, 0.0
    for bits, num_tokens in product((4, 8), (2, 3, 5, 8)):
        layers = [nn.QuantizedLinear(512, width, bias=False, group_size=64, bits=bits) for width in (512, 256)]
        for layer in layers:
            layer.set_dtype(mx.bfloat16)
        x = mx.random.normal((2, num_tokens, 512), key=mx.random.key(1)).astype(mx.bfloat16)
        if (alone := verifier.quantized_linear(layers[0], x)) is None:
            return "the library's exact verifier declines affine quantization"
        for layer, verified in zip([layers[0], *layers], [alone, *verifier._linears(layers, x)], strict=True):
            if (error := error_of(verified, _product(layer, x))) > BFLOAT16_LIMIT:
                return KernelFigure(error, BFLOAT16_LIMIT, f"against float64: {bits} bits, {num_tokens} tokens")
            single = [mx.concatenate([layer(x[i : i + 1, j : j + 1]) for j in range(num_tokens)], 1) for i in range(2)]
            worst = max(worst, error_of(verified, mx.concatenate(single)))
    return KernelFigure(worst, 0.0, "against single tokens", is_wrong=False)


def _product(layer: nn.QuantizedLinear, x: mx.array) -> np.ndarray:
    """Return what a quantized layer stands for, times x, in float64."""
    return float64_of(x) @ _exact_weight(layer).T


def _exact_weight(layer: Any) -> np.ndarray:
    """Return what a linear layer stands for, in float64."""
    if "scales" not in layer:
        return float64_of(layer.weight)
    scales, biases = layer.scales.astype(mx.float32), layer["biases"].astype(mx.float32)
    return float64_of(mx.dequantize(layer.weight, scales, biases, group_size=layer.group_size, bits=layer.bits))


def cache_write() -> KernelFigure:
    """Write one token per row into the slots of a decode group, and see whether the cache is copied."""
    shape = (4, 4, SLOTS, 64)
    layer = BatchKVLayer(mx.zeros(shape), mx.zeros(shape), Cursor(mx.array([3, 700, 9, 4000], mx.int32), SLOTS))
    new = mx.ones((4, 4, 1, 64))
    mx.eval(layer.state, new)
    whole = layer.nbytes
    layer.update_and_fetch(new, new)
    mx.eval(layer.state)  # compiles kernels
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    layer.update_and_fetch(new, 2 * new)
    mx.eval(layer.state)
    copied = (mx.get_peak_memory() - before) / whole
    written = np.array(layer.values)[np.arange(4), 0, [3, 700, 9, 4000], 0]
    if not (written == 2).all() or float(layer.values.sum()) != 2 * new.size:
        return KernelFigure(float("inf"), 0.0, "tokens are not where they belong")
    return KernelFigure(copied, 0.5, f"share of {whole / 2**20:.0f} MiB that a step copies", is_wrong=False)


def cached_kernels() -> KernelFigure | str:
    """Cache code that adds 2 as that of a kernel that adds 1: MLX must run it, and all before must be cached."""
    if devices.device_kind() != "cuda":
        return "the cache of compiled kernels is for CUDA alone"
    if cuda_kernel.FOLDER not in os.environ:
        return KernelFigure(1.0, 0.0, "there is no folder for it", is_wrong=False)
    kernel, x = f"cached_{os.getpid()}", mx.zeros(1)
    name = cuda_kernel.kernel_name(kernel, ())
    one, two = (CudaKernel(kernel, ["x"], ["y"], f"y[0] = x[0] + {n};") for n in (1, 2))
    path = cuda_kernel.code_path(name, one.whole_source(name, [x], (), [mx.float32]))
    try:
        code = cuda_kernel.compiled(name, two.whole_source(name, [x], (), [mx.float32]))
        cuda_kernel.write_code(path, name, *code)
        [y] = one([x], (), (1, 1, 1), (1, 1, 1), [(1,)], [mx.float32])
        is_found = float(np.array(y)[0]) == 2
    except (OSError, RuntimeError) as error:
        return KernelFigure(1.0, 0.0, str(error)[:300], is_wrong=False)
    finally:
        for file in (path, path.with_suffix(".txt")):
            file.unlink(missing_ok=True)
    reasons = [*([] if is_found else ["MLX does not read the cache"]), *cuda_kernel.failures()]
    what = reasons[0][:300] if reasons else "no start compiles a kernel again"
    return KernelFigure(len(reasons), 0.0, what, is_wrong=False)


KERNEL_CHECKS: dict[str, Callable[[], KernelFigure | str]] = {
    "M-RoPE": rotary_positions,
    "gated delta rule": gated_delta_rule,
    "gated delta rule with states": gated_delta_states,
    "products of few rows": few_rows,
    "products of few rows, 4 and 8 bits": quantized_rows,
    "products of experts": experts,
    "decoder layers": decoder_layers,
    "decoder layers, same bits": same_bits,
    "attention of decode steps": step_attention,
    "attention of prompts": prompt_attention,
    "depthwise convolution": depthwise_convolution,
    "quantized output layer": quantized_head,
    "exact verifier, output layer": exact_verifier_head,
    "cache write (put_along_axis)": cache_write,
    "cache of CUDA kernels": cached_kernels,
}
