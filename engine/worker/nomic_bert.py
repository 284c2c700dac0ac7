"""NomicBERT: an encoder with rotary positions and a gated MLP, whose module mlx-vlm lacks.

The arithmetic is that of transformers' `NomicBertModel` (modeling_nomic_bert.py) for each text alone: with the dynamic
NTK scaling the base of the rope depends on the number of tokens of the text, never on those of texts beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.bert.bert import BertPooler

PREFIXES = ("nomic_bert.", "bert.")
"""Beginnings of tensors' names in checkpoints with a head, of transformers and of the published code."""

UNUSED = ("cls.", "rotary_emb.")
"""Beginnings of the names of tensors that no embedding and no score needs."""

NAMES = {
    "encoder.layers.": "layers.",
    "emb_ln.": "embeddings.LayerNorm.",
    ".attn.rotary_emb.": ".rotary_emb.",
    ".attn.out_proj.": ".self_attn.o_proj.",
    ".attn.Wqkv.": ".self_attn.Wqkv.",
    ".mlp.fc11.": ".mlp.up_proj.",
    ".mlp.fc12.": ".mlp.gate_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
    ".norm1.": ".post_attention_layernorm.",
    ".norm2.": ".post_mlp_layernorm.",
}
"""Parts of tensors' names in published checkpoints -> those of transformers."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants, by the names of transformers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    head_dim: int
    type_vocab_size: int
    layer_norm_eps: float
    max_position_embeddings: int
    """Tokens that it was trained for."""
    rope_theta: float
    """Base of the rope."""
    rope_factor: float | None
    """Factor of the dynamic NTK scaling for longer texts; None without one."""
    num_labels: int = 1


class Embeddings(nn.Module):
    """Embeddings of tokens and of their types, and a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, token_ids: mx.array, types: mx.array | None) -> mx.array:
        hidden = self.word_embeddings(token_ids)
        if "token_type_embeddings" in self:
            hidden = hidden + self.token_type_embeddings(mx.zeros_like(token_ids) if types is None else types)
        return self.LayerNorm(hidden)


class Attention(nn.Module):
    """Attention in both directions without biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        size = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)

    def __call__(self, hidden: mx.array, angles: mx.array, mask: mx.array | None) -> mx.array:
        num_texts, num_tokens, _ = hidden.shape
        q, k, v = (
            part(hidden).reshape(num_texts, num_tokens, self.num_heads, self.head_dim).swapaxes(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = mx.fast.scaled_dot_product_attention(
            _rotated(q, angles), _rotated(k, angles), v, scale=self.head_dim**-0.5, mask=mask
        )
        return self.o_proj(mixed.swapaxes(1, 2).reshape(num_texts, num_tokens, -1))


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """A layer, each part of which has a norm behind its sum with the residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, hidden: mx.array, angles: mx.array, mask: mx.array | None) -> mx.array:
        hidden = self.post_attention_layernorm(hidden + self.self_attn(hidden, angles, mask))
        return self.post_mlp_layernorm(hidden + self.mlp(hidden))


class Model(nn.Module):
    """The encoder, without a head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]

    def __call__(
        self, token_ids: mx.array, types: mx.array | None, lengths: Sequence[int], mask: mx.array | None
    ) -> mx.array:
        """Return the hidden states [B, L, hidden].

        Args:
            token_ids: [B, L].
            types: [B, L]; None: all tokens have type 0.
            lengths: Tokens of each text, without padding.
            mask: Bool, which broadcasts to [B, heads, L, L]: the tokens that a token sees; None: all.
        """
        angles, hidden = self.angles(lengths, token_ids.shape[1]), self.embeddings(token_ids, types)
        for layer in self.layers:
            hidden = layer(hidden, angles, mask)
        return hidden

    def angles(self, lengths: Sequence[int], num_tokens: int) -> mx.array:
        """Return the angles of the rope, float32 [B, 1, num_tokens, head_dim / 2], B = 1 if all texts have the same.

        The base of a text beyond the trained length grows with its number of tokens (dynamic NTK scaling).
        """
        config, size = self.config, self.config.head_dim
        trained, factor = config.max_position_embeddings, config.rope_factor
        over = [1.0] if factor is None else [factor * max(n, trained) / trained - (factor - 1) for n in lengths]
        bases = config.rope_theta * np.array(over if max(over) > 1 else [1.0]) ** (size / (size - 2))
        frequencies = bases[:, None] ** -(np.arange(0, size, 2) / size)
        return (
            mx.arange(num_tokens, dtype=mx.float32)[:, None] * mx.array(frequencies.astype(np.float32))[:, None, None]
        )

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's weights by the names of this module."""
        found: dict[str, mx.array] = {}
        for published, weight in weights.items():
            name = _renamed(published)
            if name.startswith(UNUSED) or ".rotary_emb." in name:
                continue
            if name.startswith("pooler.") and "pooler" not in self:
                continue
            if ".Wqkv." in name:
                for part, own in zip("qkv", mx.split(weight, 3, axis=0), strict=True):
                    found[name.replace("Wqkv", f"{part}_proj")] = own
            else:
                found[name] = weight
        return found


class SequenceClassificationModel(Model):
    """The encoder with an output layer for classes, behind the first token's state."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.pooler = BertPooler(config)  # pyright: ignore[reportArgumentType]  # it reads hidden_size alone
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)


def _rotated(x: mx.array, angles: mx.array) -> mx.array:
    """Rotate the first and the second half of the heads [B, heads, L, head_dim] against each other, in float32."""
    one, other = mx.split(x.astype(mx.float32), 2, axis=-1)
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1).astype(x.dtype)


def _renamed(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for published, own in NAMES.items():
        if published in name:
            name = name.replace(published, own)
    return name
