"""DFlash drafters: one forward over the newest token and masks drafts a block (arXiv 2602.06036).

A drafter reads the outputs of several layers of the target. Their projection gives the keys and values of each position
in all layers of the drafter; a block sees them and, in both directions unless it is causal, itself. The layers are the
library's, whose attention takes one row; here each row has an end of its own.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache
from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention, DFlashDraftModel
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.worker.heads.dflash_config import AUTO_MAP, block_size, dflash_config, is_dflash
from engine.worker.heads.head import BlockHead, Head, SharesTarget
from engine.worker.heads.head_files import check_fit, split_tensors
from engine.worker.heads.read_outputs import check_outputs
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import config_of
from engine.worker.layer_outputs import LayerOutputs, layers_of

TARGETS = (
    *("llama", "gpt_oss", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
"""model_type of the language models that are drafted for: they embed tokens without a scale, as the drafter does."""
SHARED = ("embed_tokens.", "model.embed_tokens.", "lm_head.")
"""Tensors that a drafter with an embedding or output layer of its own would have."""


class DFlashHead(SharesTarget, DFlashDraftModel):
    """Implements Head and BlockHead.

    Args:
        config: Of the drafter.
        language_model: The library's language model of the target.
    """

    as_offset = False
    model_path: Path
    rope: Any  # which also takes an offset of each row

    def __init__(self, config: DFlashConfig, language_model: Any):
        super().__init__(config)
        self.hidden_size = config.hidden_size
        self.block_size = block_size(config)
        self.mask_token_id = config.mask_token_id
        self.width = len(config.target_layer_ids) * config.hidden_size
        """Values that it reads of a token."""
        self.layer_outputs = LayerOutputs(language_model, config.target_layer_ids)

    @property
    def block(self) -> BlockHead:
        return self

    def make_cache(self) -> SequenceCache:
        return [KVCache() for _ in self.layers]

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Write the keys and values of hidden states; return their projection, from which nothing is drafted."""
        read = self.hidden_norm(self.fc(hidden)) if hidden.shape[-1] == self.width else hidden
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer_cache.update_and_fetch(*self._keys_values(layer.self_attn, read, positions))
        return read

    def block_states(self, embeds: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        x = embeds
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), layer_cache, positions)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def _attend(self, attention: DFlashAttention, x: mx.array, cache: Any, positions: mx.array) -> mx.array:
        queries = attention.q_norm(_split(attention.q_proj(x), attention.n_heads)).transpose(0, 2, 1, 3)
        queries = self.rope(queries, offset=positions[:, 0])
        keys, values = cache.update_and_fetch(*self._keys_values(attention, x, positions))
        seen = seen_slots(keys.shape[2], positions, attention.sliding_window, attention.is_causal)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=attention.scale, mask=seen, sinks=attention.attention_sink_bias
        )
        return attention.o_proj(out.transpose(0, 2, 1, 3).flatten(2))

    def _keys_values(self, attention: DFlashAttention, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values [B, kv heads, L, head_dim] of hidden states [B, L, hidden_size]."""
        keys, values = (_split(one(x), attention.n_kv_heads) for one in (attention.k_proj, attention.v_proj))
        keys = self.rope(attention.k_norm(keys).transpose(0, 2, 1, 3), offset=positions[:, 0])
        return keys, values.transpose(0, 2, 1, 3)


class DFlashFormat:
    """Implements HeadFormat."""

    split_types = ()
    tensors = "DFlash"

    @property
    def known_code(self) -> dict[str, Any]:
        return {"auto_map": AUTO_MAP}

    def is_in(self, model_dir: Path) -> bool:
        return is_dflash(read_config(model_dir))

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config = read_config(head_dir)
        head_config = dflash_config(config, head_dir)
        _check_target(head_config, config, language_model, head_dir)
        weights = split_tensors(head_dir)
        own = sorted(name for name in weights if name.startswith(SHARED))
        if own:
            raise EngineFailed(
                f"the DFlash drafter in {head_dir} has {own[0]}, expected none: it shares the model's embedding and "
                "output layer"
            )
        head: Any = DFlashHead(head_config, language_model)
        check_outputs("DFlash drafter", head, head.width, language_model, head_dir)
        load_model_weights(head, config, head.sanitize(weights), head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""


def seen_slots(num_slots: int, positions: mx.array, window: int | None, is_causal: bool) -> mx.array:
    """Return which slots of its row each token of a block sees, bool [B, 1, L, num_slots] or [B, 1, 1, num_slots].

    Args:
        num_slots: Slots of the cache, of which slot p has position p.
        positions: int32 [B, L], of the block's tokens.
        window: Tokens that the block's first token sees, itself included; None for all. The others see as far back, or
            each as many if the block is causal.
        is_causal: Whether a token sees none after it.
    """
    slots = mx.arange(num_slots)
    own = (positions if is_causal else positions[:, -1:])[:, None, :, None]
    seen = slots <= own
    if window is not None:
        seen &= slots > (own if is_causal else positions[:, None, :1, None]) - window
    return seen


def _split(x: mx.array, num_heads: int) -> mx.array:
    return x.reshape(*x.shape[:2], num_heads, -1)


def _check_target(head: DFlashConfig, config: dict[str, Any], language_model: Any, head_dir: Path) -> None:
    """Raise EngineFailed if a drafter was made for another target, or for one of a family that is not drafted for."""
    target, num_layers = config_of(language_model), len(layers_of(language_model))
    if target.model_type not in TARGETS:
        raise EngineFailed(
            f"the DFlash drafter in {head_dir} cannot draft for this model: its model_type is {target.model_type!r}, "
            f"expected one of {', '.join(TARGETS)}"
        )
    declared = (config.get("dflash_config") or {}).get("num_target_layers", config.get("num_target_layers"))
    found = {"hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
    expected = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    if declared is not None:
        found["num_target_layers"], expected["num_target_layers"] = declared, num_layers
    check_fit(found, expected, head_dir)
    ids = head.target_layer_ids
    if not ids or not all(type(i) is int and 0 <= i < num_layers for i in ids):
        raise EngineFailed(
            f"the DFlash drafter in {head_dir} reads the layers {ids}, and the model has {num_layers}; expected some "
            f"from 0 to {num_layers - 1}"
        )
