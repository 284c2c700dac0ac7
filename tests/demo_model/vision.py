"""The vision tower of Qwen3.5 for training."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.demo_model.batches import POSITION_SIDE, ImageBatch
from tests.demo_model.encoding import PATCH_GRID
from tests.demo_model.layers import Linear, random_weights, rotate

MERGED = PATCH_GRID.merge_size**2
"""Patches per token."""
FRAMES = 2
"""Frames per patch; an image fills all of them."""


@dataclass(frozen=True)
class VisionConfig:
    depth: int = 4
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4


class LayerNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = mx.ones((size,)), mx.zeros((size,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, 1e-6)


class VisionTower(nn.Module):
    def __init__(self, rng: np.random.Generator, config: VisionConfig, output_size: int, dtype: mx.Dtype):
        super().__init__()
        size = config.hidden_size
        self.patch_embed = PatchEmbedding(rng, size, dtype)
        self.pos_embed = PositionEmbedding(rng, size)
        self.blocks = [VisionBlock(rng, config, dtype) for _ in range(config.depth)]
        self.merger = Merger(rng, size, output_size, dtype)
        half = size // config.num_heads // 2
        self._frequencies = 10000.0 ** -(mx.arange(0, half, 2) / half)

    def __call__(self, images: ImageBatch) -> mx.array:
        """Return float32 [num_images, P / MERGED, output size]; what stands for padding has no meaning."""
        x = self.patch_embed(mx.array(images.patches)) + self.pos_embed(images)
        angles = mx.array(images.coordinates)[..., None] * self._frequencies  # [num_images, P, 2, frequencies]
        angles = mx.tile(angles.flatten(2), 2)[:, :, None]
        cos, sin, mask = mx.cos(angles), mx.sin(angles), mx.array(images.is_patch)[:, None, None]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.merger(x)


class PatchEmbedding(nn.Module):
    def __init__(self, rng: np.random.Generator, size: int, dtype: mx.Dtype):
        super().__init__()
        self.proj = PatchProjection(rng, size, dtype)

    def __call__(self, patches: mx.array) -> mx.array:
        return self.proj(patches.astype(mx.float32) / 127.5 - 1.0)


class PatchProjection(nn.Module):
    """weight [outputs, 3, FRAMES, patch_size, patch_size]: an image is multiplied with the sum over the frames."""

    def __init__(self, rng: np.random.Generator, size: int, dtype: mx.Dtype):
        super().__init__()
        patch = PATCH_GRID.patch_size
        self.weight, self.bias = random_weights(rng, size, 3, FRAMES, patch, patch, std=0.02), mx.zeros((size,))
        self._dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight.sum(axis=2).flatten(1).T
        return (x.astype(self._dtype) @ weight.astype(self._dtype)).astype(mx.float32) + self.bias


class PositionEmbedding(nn.Module):
    def __init__(self, rng: np.random.Generator, size: int):
        super().__init__()
        self.weight = random_weights(rng, POSITION_SIDE**2, size, std=0.05)

    def __call__(self, images: ImageBatch) -> mx.array:
        corners = self.weight[mx.array(images.corners)]
        return (corners * mx.array(images.corner_weights)[..., None]).sum(axis=-2)


class VisionBlock(nn.Module):
    def __init__(self, rng: np.random.Generator, config: VisionConfig, dtype: mx.Dtype):
        super().__init__()
        size = config.hidden_size
        self.norm1, self.norm2 = LayerNorm(size), LayerNorm(size)
        self.attn = VisionAttention(rng, size, config.num_heads, dtype)
        self.mlp = VisionMLP(rng, size, config.intermediate_size, dtype)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, mask: mx.array) -> mx.array:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class VisionAttention(nn.Module):
    def __init__(self, rng: np.random.Generator, size: int, num_heads: int, dtype: mx.Dtype):
        super().__init__()
        self.qkv = Linear(rng, 3 * size, size, dtype, bias=True)
        self.proj = Linear(rng, size, size, dtype, std=0.02, bias=True)
        self._num_heads, self._dtype = num_heads, dtype

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, mask: mx.array) -> mx.array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3, self._num_heads, -1)
        queries, keys = rotate(heads[:, :, 0], cos, sin), rotate(heads[:, :, 1], cos, sin)
        q, k, v = (mx.swapaxes(h.astype(self._dtype), 1, 2) for h in (queries, keys, heads[:, :, 2]))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
        return self.proj(mx.swapaxes(y, 1, 2).reshape(x.shape))


class VisionMLP(nn.Module):
    def __init__(self, rng: np.random.Generator, size: int, inner: int, dtype: mx.Dtype):
        super().__init__()
        self.linear_fc1 = Linear(rng, inner, size, dtype, bias=True)
        self.linear_fc2 = Linear(rng, size, inner, dtype, std=0.02, bias=True)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))


class Merger(nn.Module):
    """Four neighboring patches become one token."""

    def __init__(self, rng: np.random.Generator, size: int, output_size: int, dtype: mx.Dtype):
        super().__init__()
        self.norm = LayerNorm(size)
        self.linear_fc1 = Linear(rng, MERGED * size, MERGED * size, dtype, bias=True)
        self.linear_fc2 = Linear(rng, output_size, MERGED * size, dtype, bias=True)

    def __call__(self, x: mx.array) -> mx.array:
        tokens = self.norm(x).reshape(x.shape[0], x.shape[1] // MERGED, -1)
        return self.linear_fc2(nn.gelu(self.linear_fc1(tokens)))
