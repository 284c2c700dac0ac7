"""The trainable models: Pico, a Qwen3.5 with vision tower and MTP head, and its small draft, a Qwen3."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.demo_model.batches import Batch
from tests.demo_model.layers import Context, DecoderLayer, LayerConfig, Linear, RMSNorm, random_weights
from tests.demo_model.vision import VisionConfig, VisionTower

VOCAB_SIZE = 4096
ROPE_THETA = 1e6


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model."""

    layers: LayerConfig
    num_layers: int
    attention_interval: int  # every so manieth layer has full attention, the others the delta rule
    rotary_share: float  # of a head's values that are rotated by the position
    rope_sections: tuple[int, int, int] | None  # frequencies for time, height and width; None: text only
    vision: VisionConfig | None  # None: a text model without an MTP head


PICO = ModelConfig(
    layers=LayerConfig(hidden_size=256, intermediate_size=768, num_heads=4, num_kv_heads=2, head_dim=64),
    num_layers=8,
    attention_interval=4,
    rotary_share=0.5,
    rope_sections=(6, 5, 5),
    vision=VisionConfig(),
)
DRAFT = ModelConfig(
    layers=LayerConfig(192, 512, num_heads=4, num_kv_heads=2, head_dim=64, is_gated=False),
    num_layers=4,
    attention_interval=1,
    rotary_share=1.0,
    rope_sections=None,
    vision=None,
)


class TextModel(nn.Module):
    def __init__(self, rng: np.random.Generator, config: ModelConfig):
        super().__init__()
        self.embed_tokens = Embedding(rng, config.layers.hidden_size)
        self.layers = [
            DecoderLayer(rng, config.layers, full_attention=(index + 1) % config.attention_interval == 0)
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.layers.hidden_size, config.layers.is_gated)


class Embedding(nn.Module):
    def __init__(self, rng: np.random.Generator, size: int):
        super().__init__()
        self.weight = random_weights(rng, VOCAB_SIZE, size, std=0.05)


class MTPHead(nn.Module):
    """Guesses the token after the next one from a hidden state and the next token."""

    def __init__(self, rng: np.random.Generator, config: LayerConfig):
        super().__init__()
        size = config.hidden_size
        self.fc = Linear(rng, size, 2 * size, config.dtype)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(size, True), RMSNorm(size, True)
        self.layers = [DecoderLayer(rng, config, full_attention=True)]
        self.norm = RMSNorm(size, True)

    def __call__(self, hidden: mx.array, embeddings: mx.array, context: Context) -> mx.array:
        both = mx.concatenate([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], axis=-1)
        return self.norm(self.layers[0](self.fc(both), context))


class TrainableModel(nn.Module):
    """A language model with whatever its config asks for; equal seeds give equal weights."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.language_model = TextModel(rng, config)
        if config.vision is not None:
            layers = config.layers
            self.visual = VisionTower(rng, config.vision, layers.hidden_size, layers.dtype)
            self.mtp = MTPHead(rng, layers)
        self.config = config
        self._rotary = Rotary(config)

    def __call__(self, batch: Batch) -> mx.array:
        """Return the hidden states behind the last norm, float32 [B, T, hidden]."""
        x = self._embed(batch)
        context = self._context(batch, batch.positions if self.config.rope_sections else _along_text(batch))
        for layer in self.language_model.layers:
            x = layer(x, context)
        return self.language_model.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [..., VOCAB_SIZE]: the embedding is the output layer too."""
        dtype = self.config.layers.dtype
        weight = self.language_model.embed_tokens.weight
        return (hidden.astype(dtype) @ weight.T.astype(dtype)).astype(mx.float32)

    def drafts(self, batch: Batch, hidden: mx.array, count: int) -> list[mx.array]:
        """Return the head's hidden states, float32 [B, T, hidden], for the tokens 2, 3, ... ahead.

        Each but the first comes from the head's own state in front of it. hidden: of the model.
        """
        context, states = self._context(batch, _along_text(batch)), []
        for distance in range(1, count + 1):
            token_ids, _ = batch.ahead(distance)
            embeddings = self.language_model.embed_tokens.weight[mx.array(token_ids)]
            hidden = self.mtp(hidden, embeddings, context)
            states.append(hidden)
        return states

    def loss(self, batch: Batch, mtp_weights: Sequence[float]) -> mx.array:
        """Return the weighted cross entropy of the next token, and of the head's first guesses with their weights."""
        hidden = self(batch)
        total = self._cross_entropy(batch, hidden, 1)
        if self.config.vision is not None:
            for distance, (state, weight) in enumerate(
                zip(self.drafts(batch, hidden, len(mtp_weights)), mtp_weights, strict=True), 2
            ):
                total = total + weight * self._cross_entropy(batch, state, distance)
        return total

    def _cross_entropy(self, batch: Batch, hidden: mx.array, distance: int) -> mx.array:
        token_ids, weights = batch.ahead(distance)
        losses = nn.losses.cross_entropy(self.logits(hidden), mx.array(token_ids), weights=mx.array(weights))
        return losses.sum() / float(weights.sum())

    def _embed(self, batch: Batch) -> mx.array:
        embeddings = self.language_model.embed_tokens.weight[mx.array(batch.token_ids)]
        if batch.images is None:
            return embeddings
        features = self.visual(batch.images)
        both = mx.concatenate([embeddings.flatten(0, 1), features.flatten(0, 1)])
        return both[mx.array(batch.images.sources)].reshape(embeddings.shape)

    def _context(self, batch: Batch, positions: np.ndarray) -> Context:
        cos, sin = self._rotary(mx.array(positions))
        mask: mx.array | str = "causal"
        if batch.is_packed:
            documents = mx.array(batch.documents)
            length = documents.shape[1]
            mask = (documents[:, :, None] == documents[:, None]) & mx.tril(mx.ones((length, length), mx.bool_))
            mask = mask[:, None]
        return Context(mx.array(batch.offsets), cos, sin, mask)


def _along_text(batch: Batch) -> np.ndarray:
    """Positions int32 [3, B, T] that count the tokens, those of images too."""
    return np.broadcast_to(batch.offsets, batch.positions.shape)


class Rotary:
    """Angles of the rotary positions. In text all three coordinates are equal."""

    def __init__(self, config: ModelConfig):
        size = int(config.layers.head_dim * config.rotary_share)
        self._frequencies = ROPE_THETA ** -(mx.arange(0, size, 2) / size)
        axes = np.zeros(size // 2, np.int32)
        for axis, section in enumerate(config.rope_sections or ()):
            axes[axis : 3 * section : 3] = axis  # interleaved: time, height, width, time, ...
        self._axes = mx.array(axes)

    def __call__(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """positions int32 [3, B, T]. Returns cosine and sine, float32 [B, T, 1, rotary size]."""
        coordinates = mx.moveaxis(positions[self._axes], 0, -1)
        angles = mx.tile(coordinates.astype(mx.float32) * self._frequencies, 2)[..., None, :]
        return mx.cos(angles), mx.sin(angles)
