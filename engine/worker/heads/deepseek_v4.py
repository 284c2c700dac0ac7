"""The head of DeepSeek V4, `mtp.*`: a layer with a sliding window, between projections and a readout of its own.

It reads the hyper-connection streams that the target's last layer returns, and its states are such streams.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters.deepseek_v4_mtp import DeepseekV4MTPDraftModel, ModelConfig
from mlx_vlm.speculative.drafters.deepseek_v4_mtp.split import DeepseekV4MTPSplitter

from engine.errors import EngineFailed
from engine.worker.heads.library import LibraryFormat
from engine.worker.language_model import config_of
from engine.worker.layer_outputs import LayerOutputs


class DeepseekV4Head(DeepseekV4MTPDraftModel):
    """Implements Head.

    Args:
        language_model: The library's language model of the target, whose configuration is the head's too.
    """

    as_offset = True
    embed_tokens = None
    block = None
    sharing = None
    model_path: Path

    def __init__(self, language_model: Any):
        args = config_of(language_model)
        super().__init__(ModelConfig(text_config=args))
        self._next_position: Any = None  # its layer takes positions from the cache
        self.hidden_size = args.hc_mult * args.hidden_size
        self.layer_outputs = LayerOutputs(language_model, [args.num_hidden_layers - 1])
        self._output_layer = lambda hidden: language_model.lm_head(hidden)
        self._may_cast = language_model.cast_predicate

    @property
    def cast_predicate(self):
        return lambda name: self._may_cast(f"mtp.{name}")

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        text = mx.zeros(positions.shape, mx.int32)  # ids only tell images, of which no prompt of this family has any
        return self._forward_hidden(embeds, hidden, text, cache)[1].flatten(2)

    def logits(self, states: mx.array) -> mx.array:
        return self._output_layer(self.norm(self.hc_head(self._target_hidden(states))))


class _Splitter(DeepseekV4MTPSplitter):
    """Reads the tensors of one MTP layer; those of DSpark have the same prefix, but are another kind of drafter."""

    def select_keys(self, key: str, text_config: dict) -> bool:
        return not text_config.get("dspark_target_layer_ids") and super().select_keys(key, text_config)

    def rename(self, tensors: dict[str, mx.array], text_config: dict) -> dict[str, mx.array]:
        layers = {part for name in tensors if (part := name.split(".")[1]).isdigit()}
        if len(layers) > 1:  # the library would let one replace another
            raise EngineFailed(f"the MTP head has the layers {', '.join(sorted(layers))} of mtp.*; expected one")
        return tensors


DEEPSEEK_V4 = LibraryFormat(
    "deepseek_v4", _Splitter, DeepseekV4Head, "mtp.* (DSpark's are not supported)", ("emb.", "head.")
)
