"""The head of DeepSeek-V3 and GLM: one more decoder layer of the target's kind, between a projection and a norm.

Checkpoints store it as the layer after the last one. Conversions for MLX leave it out, so that `mtp_head` names the
original checkpoint, or the output of mlx_vlm.split_mtp. The copies of the embedding and of the output layer that the
files contain are not read: the head shares the target's, as it did when it was trained.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_vlm.models.glm_moe_dsa.language import GlmMoeDsaAttention, GlmMoeDsaDecoderLayer
from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.worker.config_fields import ARITHMETIC
from engine.worker.heads.head import Head, SharesTarget
from engine.worker.heads.head_files import check_fit, has_tensors, split_tensors
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import config_of
from engine.worker.layer_caches import single_caches
from engine.worker.layer_kinds import is_combined
from engine.worker.layer_outputs import class_of

OWN_NAMES = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head_norm.weight": "norm.weight",
}
PROJECTION = "eh_proj."
SHARED = ("embed_tokens.", "shared_head.head.", "lm_head.")
"""Tensors that the target has too."""
NOT_LOADED = ("rotary_emb.inv_freq",)
SPLIT_PREFIXES = ("model.mtp_block.", "model.", "mtp.")
"""Before the names in split heads, longest first."""


class NextnHead(SharesTarget, nn.Module):
    """Implements Head.

    Args:
        language_model: The library's language model of the target, whose last layer is of the head's kind.
    """

    as_offset = True
    model_path: Path

    def __init__(self, language_model: Any):
        super().__init__()
        args = config_of(language_model)
        self.hidden_size = size = args.hidden_size
        eps, last = args.rms_norm_eps, args.num_hidden_layers - 1
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layer = class_of(language_model.model.layers[last])(args, last)
        if isinstance(self.layer, GlmMoeDsaDecoderLayer):  # its indexer is its own, not that of a layer before
            self.layer.self_attn = GlmMoeDsaAttention(args, last + 1, force_full_indexer=True)
        self.norm = nn.RMSNorm(size, eps=eps)
        cache = make_prompt_cache(language_model)[last]
        self._num_caches, self._is_combined = len(single_caches(cache)), is_combined(cache)
        self._is_latent = hasattr(args, "kv_lora_rank")  # its attention takes masks as arrays alone

    @property
    def cast_predicate(self):
        return lambda name: "e_score_correction_bias" not in name

    def make_cache(self) -> SequenceCache:
        return [KVCache() for _ in range(self._num_caches)]

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        x = self.projection(mx.concatenate([self.embedding_norm(embeds), self.hidden_norm(hidden)], axis=-1))
        mask = create_attention_mask(x, cache[0], return_array=self._is_latent)
        out = self.layer(x, mask, CacheList(*cache) if self._is_combined else cache[0])
        return self.norm(out[0] if isinstance(out, tuple) else out)


class _Splitter(MTPSplitter):
    """Reads the tensors of the layer after the last one, without their prefix, in the precision that they stand for."""

    def prefix(self, text_config: dict) -> str:
        return f"model.layers.{int(text_config['num_hidden_layers'])}."

    def select_keys(self, key: str, text_config: dict) -> bool:
        return key.startswith(self.prefix(text_config))

    def rename(self, tensors: dict[str, mx.array], text_config: dict) -> dict[str, mx.array]:
        prefix = self.prefix(text_config)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class NextnFormat:
    """Implements HeadFormat."""

    split_types = ("glm4_moe_lite_mtp", "glm_moe_dsa_mtp")
    tensors = "model.layers.<num_hidden_layers>.*"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, _Splitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config = read_config(head_dir)
        target = config_of(language_model)
        family = config.get("model_type")
        if family in self.split_types:
            weights = {_without_prefix(name): tensor for name, tensor in split_tensors(head_dir).items()}
        elif family == target.model_type:
            config, weights = _Splitter().prepare(head_dir)
        else:
            expected = ", ".join((*self.split_types, target.model_type))
            raise EngineFailed(f"the MTP head in {head_dir}: model_type is {family!r}, expected one of {expected}")
        names = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "rope_theta", *ARITHMETIC)
        text_config = config["text_config"]
        known = {name: getattr(target, name) for name in names if name in text_config and hasattr(target, name)}
        check_fit(text_config, known, head_dir)
        own = _own_tensors(weights, language_model)
        head: Any = load_model_weights(NextnHead(language_model), config, own, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""


NEXTN_FORMATS: dict[str, NextnFormat] = {
    family: NextnFormat() for family in ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
}
"""By the model_type of a checkpoint."""


def _without_prefix(name: str) -> str:
    for prefix in SPLIT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _own_tensors(tensors: dict[str, mx.array], language_model: Any) -> dict[str, mx.array]:
    """Return the tensors by the names of a NextnHead.

    Those of the decoder layer take the form that the library gives them in the target's last layer: experts stacked,
    latent projections absorbed.
    """
    own: dict[str, mx.array] = {}
    prefix = f"model.layers.{config_of(language_model).num_hidden_layers - 1}."
    layer: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if name.startswith(SHARED) or name.endswith(NOT_LOADED):
            continue
        if name in OWN_NAMES:
            own[OWN_NAMES[name]] = tensor
        elif name.startswith(PROJECTION):
            own[f"projection.{name.removeprefix(PROJECTION)}"] = tensor
        else:
            layer[prefix + name] = tensor
    return own | {f"layer.{k.removeprefix(prefix)}": v for k, v in language_model.sanitize(layer).items()}
