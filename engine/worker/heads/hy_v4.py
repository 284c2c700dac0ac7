"""The head of HY V4, `model.mtp_layers.0.*`: a projection of both inputs, a layer with an index, and a norm.

Its layer has none of the target's hyper-connections: it reads the hidden states after the target's last norm.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import CacheList
from mlx_vlm.speculative.drafters.hy_v4_mtp import HyV4MTPDraftModel, ModelConfig
from mlx_vlm.speculative.drafters.hy_v4_mtp.split import HyV4MTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.worker.config_fields import ARITHMETIC
from engine.worker.heads.head import Head, SharesTarget
from engine.worker.heads.head_files import check_fit, has_tensors, read_head
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import config_of
from engine.worker.layer_caches import row_caches

COMMON = (
    *("hidden_size", "vocab_size", "num_attention_heads", "rope_theta", "index_topk", "num_experts_per_tok"),
    *ARITHMETIC,
)
"""Fields of the configuration that a head and its target must have in common."""
NOT_CAST = ("e_score_correction_bias", "learnable_sink_param")


class HyV4Head(SharesTarget, HyV4MTPDraftModel):
    """Implements Head."""

    as_offset = True
    model_path: Path

    @property
    def hidden_size(self) -> int:
        return self.norm.weight.shape[0]

    @property
    def cast_predicate(self):
        return lambda name: not name.endswith(NOT_CAST)

    def make_cache(self) -> SequenceCache:  # type: ignore[override]
        return row_caches(super().make_cache())

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        return self._forward_hidden(embeds, hidden, [CacheList(*cache)], positions)


class HyV4Format:
    """Implements HeadFormat."""

    split_types = (HyV4MTPSplitter.output_model_type,)
    tensors = "model.mtp_layers.*"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, HyV4MTPSplitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config, weights = read_head(head_dir, self.split_types, dict.fromkeys(HY_V4_FORMATS, HyV4MTPSplitter))
        head_config = ModelConfig.from_dict(config)
        check_fit(_facts(head_config.text_config), _facts(config_of(language_model)), head_dir)
        head: Any = load_model_weights(HyV4Head(head_config), config, weights, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""


HY_V4_FORMATS: dict[str, HyV4Format] = {"hy_v4": HyV4Format()}
"""By the model_type of a checkpoint."""


def _facts(text_config: Any) -> dict[str, Any]:
    return {name: getattr(text_config, name) for name in COMMON if hasattr(text_config, name)}
