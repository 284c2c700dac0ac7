"""The layers of Qwen3.5 and Qwen3 for training: documents in one row see neither each other's tokens nor state.

Residuals are float32; products of matrices are computed in a dtype of their own. Parameters are named and laid out as
in checkpoints.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.demo_model.delta_rule import gated_delta_rule

FORGET = -60.0
"""Log decay in front of a document's first token."""
NORM_EPS = 1e-6


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of the layers of a language model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_gated: bool = True  # Qwen3.5: output gates in attention, norms stored as gain - 1; Qwen3 has neither
    linear_heads: int = 4  # of the delta rule
    linear_head_dim: int = 64
    conv_width: int = 4
    product_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype of products of matrices."""
        return mx.bfloat16 if self.product_dtype == "bfloat16" else mx.float32


@dataclass(frozen=True)
class Context:
    """The properties of a batch that layers need."""

    offsets: mx.array  # int32 [B, T]: tokens of the same document in front of a token
    cos: mx.array  # float32 [B, T, 1, rotary size]
    sin: mx.array
    mask: mx.array | str  # bool [B, 1, T, T], or "causal"


def random_weights(rng: np.random.Generator, *shape: int, std: float | None = None) -> mx.array:
    """Return normal weights, float32; std: by default 0.6 / sqrt(inputs)."""
    scale = 0.6 / math.sqrt(shape[-1]) if std is None else std
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32))


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Return x [..., D] with its first values rotated, as many as cos and sin have."""
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = mx.split(rotated, 2, axis=-1)
    return mx.concatenate([rotated * cos + mx.concatenate([-second, first], axis=-1) * sin, rest], axis=-1)


class Linear(nn.Module):
    """A product with weights [outputs, inputs], and a bias where there is one. Returns float32."""

    def __init__(
        self,
        rng: np.random.Generator,
        outputs: int,
        inputs: int,
        dtype: mx.Dtype,
        std: float | None = None,
        bias: bool = False,
    ):
        super().__init__()
        self.weight = random_weights(rng, outputs, inputs, std=std)
        if bias:
            self.bias = mx.zeros((outputs,))
        self._dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        y = (x.astype(self._dtype) @ self.weight.T.astype(self._dtype)).astype(mx.float32)
        return y + self.bias if "bias" in self else y


class RMSNorm(nn.Module):
    """is_shifted: the weight is the gain - 1."""

    def __init__(self, size: int, is_shifted: bool = False):
        super().__init__()
        self.weight = mx.zeros((size,)) if is_shifted else mx.ones((size,))
        self._shift = 1.0 if is_shifted else 0.0

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight + self._shift, NORM_EPS)


class Attention(nn.Module):
    def __init__(self, rng: np.random.Generator, config: LayerConfig):
        super().__init__()
        hidden, size, dtype = config.hidden_size, config.head_dim, config.dtype
        query_size = config.num_heads * size
        self.q_proj = Linear(rng, query_size * (2 if config.is_gated else 1), hidden, dtype)
        self.k_proj = Linear(rng, config.num_kv_heads * size, hidden, dtype)
        self.v_proj = Linear(rng, config.num_kv_heads * size, hidden, dtype)
        self.o_proj = Linear(rng, hidden, query_size, dtype, std=0.02)
        self.q_norm, self.k_norm = RMSNorm(size, config.is_gated), RMSNorm(size, config.is_gated)
        self._config = config

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        config = self._config
        queries, gate = self._heads(self.q_proj(x), config.num_heads), None
        if config.is_gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        keys, values = (self._heads(proj(x), config.num_kv_heads) for proj in (self.k_proj, self.v_proj))
        queries = rotate(self.q_norm(queries), context.cos, context.sin)
        keys = rotate(self.k_norm(keys), context.cos, context.sin)
        q, k, v = (mx.swapaxes(heads.astype(config.dtype), 1, 2) for heads in (queries, keys, values))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=config.head_dim**-0.5, mask=context.mask)
        y = mx.swapaxes(y, 1, 2).astype(mx.float32)
        if gate is not None:
            y = y * mx.sigmoid(gate)
        return self.o_proj(y.reshape(*x.shape[:2], -1))

    def _heads(self, x: mx.array, num_heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], num_heads, -1)


class GatedDeltaNet(nn.Module):
    def __init__(self, rng: np.random.Generator, config: LayerConfig):
        super().__init__()
        hidden, dtype = config.hidden_size, config.dtype
        size, heads = config.linear_heads * config.linear_head_dim, config.linear_heads
        self.in_proj_qkv = Linear(rng, 3 * size, hidden, dtype)
        self.in_proj_z = Linear(rng, size, hidden, dtype)
        self.in_proj_b = Linear(rng, heads, hidden, dtype)
        self.in_proj_a = Linear(rng, heads, hidden, dtype, std=0.01)
        self.conv1d = Convolution(rng, 3 * size, config.conv_width)
        step = np.exp(np.linspace(math.log(0.003), math.log(0.1), heads))
        self.dt_bias = mx.array((step + np.log(-np.expm1(-step))).astype(np.float32))
        self.A_log = mx.array(np.log(np.linspace(1, 6, heads)).astype(np.float32))
        self.norm = RMSNorm(config.linear_head_dim)
        self.out_proj = Linear(rng, hidden, size, dtype, std=0.02)
        self._num_heads = heads

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        mixed = nn.silu(self.conv1d(self.in_proj_qkv(x), context.offsets))
        q, k, v = (part.reshape(*x.shape[:2], self._num_heads, -1) for part in mx.split(mixed, 3, axis=-1))
        log_decay = -mx.exp(self.A_log) * nn.softplus(self.in_proj_a(x) + self.dt_bias)
        log_decay = mx.where(context.offsets[..., None] == 0, FORGET, log_decay)
        q = _unit(q) * q.shape[-1] ** -0.5
        y = gated_delta_rule(q, _unit(k), v, log_decay, mx.sigmoid(self.in_proj_b(x)))
        y = self.norm(y) * nn.silu(self.in_proj_z(x).reshape(y.shape))
        return self.out_proj(y.reshape(*x.shape[:2], -1))


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) + 1e-6)


class Convolution(nn.Module):
    """Each channel over the last tokens of the same document; weight [channels, 1, width], the last for the token."""

    def __init__(self, rng: np.random.Generator, channels: int, width: int):
        super().__init__()
        weight = rng.standard_normal((channels, 1, width)) * 0.2
        weight[:, :, -1] += 0.6
        self.weight = mx.array(weight.astype(np.float32))

    def __call__(self, x: mx.array, offsets: mx.array) -> mx.array:
        width = self.weight.shape[-1]
        y = x * self.weight[:, 0, width - 1]
        for back in range(1, width):
            earlier = mx.pad(x[:, :-back], [(0, 0), (back, 0), (0, 0)])
            y = y + mx.where(offsets[..., None] >= back, earlier, 0) * self.weight[:, 0, width - 1 - back]
        return y


class MLP(nn.Module):
    def __init__(self, rng: np.random.Generator, config: LayerConfig):
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.gate_proj = Linear(rng, inner, hidden, dtype)
        self.up_proj = Linear(rng, inner, hidden, dtype)
        self.down_proj = Linear(rng, hidden, inner, dtype, std=0.015)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, rng: np.random.Generator, config: LayerConfig, full_attention: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.is_gated)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.is_gated)
        if full_attention:
            self.self_attn = Attention(rng, config)
        else:
            self.linear_attn = GatedDeltaNet(rng, config)
        self.mlp = MLP(rng, config)

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        mixer: Any = self.self_attn if "self_attn" in self else self.linear_attn
        x = x + mixer(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))
