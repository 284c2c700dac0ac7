"""Phi-3-small's block-sparse attention, and the tokens that it never says.

Every other layer sees the blocks of 64 tokens near a token's own, and of the others those that its head picks by a
stride (blocks count from the start of the text). mlx_vlm 0.7.10 counts the blocks of the new tokens from the end of the
text, adds the causal mask to the scores as ones and zeros, so that later tokens of a block are seen, sets the logits of
unused tokens along the axis of the batch, and has block-sparse layers where others are dense unless they alternate. It
can be removed when the library does none of this.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import LanguageModelOutput, scaled_dot_product_attention
from mlx_vlm.models.phi3small.language import Attention, LanguageModel

LIBRARY: dict[str, Any] = {
    "attention": Attention._block_sparse_attention,
    "layer": Attention.__init__,
    "logits": LanguageModel.__call__,
    "model": LanguageModel.__init__,
}
"""The library's methods."""


def _attend(
    self: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Attend with a mask bool [L, slots] or [B, 1, L, slots] of the slots up to each token's own; None for all."""
    seen = mx.ones((1, keys.shape[2]), mx.bool_) if mask is None else mask
    seen = seen.reshape(-1, 1, *seen.shape[-2:])
    own = seen.sum(axis=-1, keepdims=True) - 1
    blocks = mx.arange(keys.shape[2]) // self.blocksparse_block_size
    is_near = own // self.blocksparse_block_size - blocks < self.blocksparse_num_local_blocks
    heads = mx.arange(1, self.n_heads + 1)[:, None, None]
    is_picked = (blocks + heads) % self.blocksparse_vert_stride == 0
    mask = seen & (is_near | is_picked)
    return scaled_dot_product_attention(queries, keys, values, cache=None, scale=scale, mask=mask)


def _layer(self: Any, args: Any, layer_idx: int) -> None:
    LIBRARY["layer"](self, args, 0)
    self.block_sparse = (layer_idx + 1) % args.dense_attention_every_n_layers != 0


def _model(self: Any, args: Any) -> None:
    LIBRARY["model"](self, args)
    is_unused: Any = np.isin(np.arange(args.vocab_size), np.array(self._dummy_tokenizer_ids))
    self._is_unused = mx.array(is_unused)


def _logits(
    self: Any,
    inputs: mx.array,
    cache: Any = None,
    inputs_embeds: mx.array | None = None,
    mask: Any = None,
    **kwargs: Any,
) -> LanguageModelOutput:
    hidden = self.model(inputs, cache, inputs_embeds=inputs_embeds)
    logits = self.model.embed_tokens.as_linear(hidden) / (self.mup_width_multiplier or 1.0)
    return LanguageModelOutput(logits=mx.where(self._is_unused, -float("inf"), logits))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    Attention._block_sparse_attention = _attend
    Attention.__init__ = _layer
    LanguageModel.__init__ = _model
    LanguageModel.__call__ = _logits
