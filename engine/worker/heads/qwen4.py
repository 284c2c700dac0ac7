"""The head of Qwen4, `mtp.*`: it reads the streams of the target's hyper-connections, and its layer has an index.

The target mixes the streams after its last layer into the hidden states for the output layer. The head reads them
before that, and its own layer returns such streams: it reads them for the next draft, and mixes them for the output
layer.
"""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.speculative.drafters.qwen4_exp_mtp import ModelConfig, Qwen4ExpMTPDraftModel
from mlx_vlm.speculative.drafters.qwen4_exp_mtp.split import Qwen4ExpMTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.worker.config_fields import ARITHMETIC
from engine.worker.heads.head import Head
from engine.worker.heads.head_files import check_fit, has_tensors, read_head
from engine.worker.heads.qwen import identity
from engine.worker.indexed_cache import IndexedCache
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel, config_of
from engine.worker.layer_caches import row_caches
from engine.worker.layer_outputs import LayerOutputs

COMMON = ("hc_count", "indexer_budget", "indexer_compress_ratio", "num_experts_per_tok", *ARITHMETIC)
"""Fields of the configuration, beside those of `identity`, that a head and its target must have in common."""


class Qwen4Head(Qwen4ExpMTPDraftModel):
    """Implements Head.

    Args:
        config: Of the head.
        language_model: The library's language model of the target.
    """

    as_offset = False
    embed_tokens = None
    block = None
    sharing = None
    model_path: Path

    def __init__(self, config: ModelConfig, language_model: Any):
        super().__init__(config)
        self.hidden_size = self.args.hc_count * self.args.hidden_size
        self.layer_outputs = LayerOutputs(language_model, [len(language_model.layers) - 1])
        self._target_logits = LanguageModel(language_model).logits

    def make_cache(self) -> SequenceCache:  # type: ignore[override]
        return row_caches(super().make_cache())

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        x = self.fuse_inputs(embeds, hidden)
        layer: Any = self.layers[0]  # reads no token ids, as it has no n-grams
        layer_cache = IndexedCache(*cache)
        mask = create_attention_mask(x, layer_cache)
        return layer(x, None, mask, layer_cache, mx.broadcast_to(positions, (3, *positions.shape)))

    def logits(self, states: mx.array) -> mx.array:
        mixed: Any = self.hyper_connection_mixer(states)
        return self._target_logits(mixed)


class Qwen4Format:
    """Implements HeadFormat."""

    split_types = (Qwen4ExpMTPSplitter.output_model_type,)
    tensors = "mtp.*"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, Qwen4ExpMTPSplitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config, weights = read_head(head_dir, self.split_types, dict.fromkeys(QWEN4_FORMATS, Qwen4ExpMTPSplitter))
        head_config = ModelConfig.from_dict(copy.deepcopy(config))  # from_dict edits its argument
        check_fit(_facts(head_config.text_config), _facts(config_of(language_model)), head_dir)
        head: Any = Qwen4Head(head_config, language_model)
        load_model_weights(head, config, weights, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: checkpoints and split heads both store the gain - 1 of its norms, as the library reads it."""


QWEN4_FORMATS: dict[str, Qwen4Format] = {"qwen4_exp": Qwen4Format()}
"""By the model_type of a checkpoint."""


def _facts(text_config: Any) -> dict[str, Any]:
    return identity(text_config) | {name: getattr(text_config, name) for name in COMMON if hasattr(text_config, name)}
