"""EAGLE-3 heads, for any family: they read the outputs of three layers, and may know a part of the vocabulary.

Read are the files of the speculators library and those that SGLang reads, which name the same tensors otherwise.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.rope_utils import initialize_rope
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config
from mlx_vlm.speculative.drafters.eagle3.eagle3 import Eagle3DraftModel
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.worker.heads.head import Head
from engine.worker.heads.head_files import check_fit, split_tensors
from engine.worker.heads.read_outputs import check_outputs
from engine.worker.language_model import config_of
from engine.worker.layer_outputs import LayerOutputs, layers_of

LOWEST = -1e9  # logit of tokens that are not in the head's vocabulary
FIRST_LAYER = "midlayer."
"""Name of the head's layer in files for SGLang."""
NUM_READ = 3
ACTIVATION = "silu"


class Eagle3Head(Eagle3DraftModel):
    """Implements Head.

    Args:
        config: Of the head.
        language_model: The library's language model of the target.
    """

    as_offset = False
    block = None
    sharing = None
    model_path: Path

    def __init__(self, config: Eagle3Config, language_model: Any):
        super().__init__(config)
        text = config.transformer_layer_config
        for layer in self.layers:
            layer.self_attn.rope = initialize_rope(
                text.head_dim, text.rope_theta, text.rope_traditional, _scaling(text), text.max_position_embeddings
            )
        self.layer_outputs = LayerOutputs(language_model, layers_read(config, len(layers_of(language_model))))
        self._places: mx.array | None = None

    def map_vocabulary(self, num_tokens: int) -> None:
        """Find the place of each of the target's tokens in the head's vocabulary, once the weights are loaded."""
        if self.d2t is None:
            return
        places = np.full(num_tokens, -1, np.int32)
        known = np.arange(self.draft_vocab_size) + np.array(self.d2t)
        places[known] = np.arange(self.draft_vocab_size)
        self._places = mx.array(places)

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        x = self._prepare_target_hidden(hidden)
        start = positions[:, 0]
        mask = create_attention_mask(x, cache[0])
        x = self.layers[0](embeds, x, mask, cache[0], start)
        for layer, layer_cache in zip(self.layers[1:], cache[1:], strict=True):
            x = layer(x, mask, layer_cache, start)
        return x

    def logits(self, states: mx.array) -> mx.array:
        own = self._logits(states)
        if self._places is None:
            return own
        return mx.where(self._places < 0, mx.array(LOWEST, own.dtype), own[..., mx.maximum(self._places, 0)])


class Eagle3Format:
    """Implements HeadFormat."""

    split_types = ("eagle3",)
    tensors = "EAGLE-3"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return is_eagle3(read_config(model_dir))

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config = read_config(head_dir)
        head_config = eagle3_config(config)
        target, text = config_of(language_model), head_config.transformer_layer_config
        found = {"hidden_size": head_config.target_hidden_size, "vocab_size": text.vocab_size}
        check_fit(found, {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}, head_dir)
        if text.hidden_act != ACTIVATION:
            raise EngineFailed(
                f"the EAGLE-3 head in {head_dir} has hidden_act {text.hidden_act!r}, expected {ACTIVATION!r}"
            )
        weights = {_name(name): tensor for name, tensor in split_tensors(head_dir).items()}
        head: Any = Eagle3Head(head_config, language_model)
        check_outputs("EAGLE-3 head", head, head.fc.weight.shape[1], language_model, head_dir)
        if "embed_tokens.weight" not in weights:
            if text.hidden_size != target.hidden_size:
                raise EngineFailed(
                    f"the EAGLE-3 head in {head_dir} has no embedding, and cannot share the model's: its hidden_size "
                    f"is {text.hidden_size}, expected {target.hidden_size}"
                )
            head.embed_tokens = None
        load_model_weights(head, config, head.sanitize(weights), head_dir, lazy=True)
        head.map_vocabulary(target.vocab_size)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""


def is_eagle3(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    named = config.get("architectures")
    kinds = [config.get("speculators_model_type"), config.get("model_type")]
    return "eagle3" in kinds or any(str(one).endswith("Eagle3") for one in (named if isinstance(named, list) else ()))


def eagle3_config(config: dict[str, Any]) -> Eagle3Config:
    """Return the library's configuration of a head from either kind of config.json."""
    layer = dict(config.get("transformer_layer_config") or config)
    if layer.get("rope_scaling"):
        layer["rope_parameters"] = {"rope_theta": layer.get("rope_theta", 10000.0)} | layer["rope_scaling"]
    if "transformer_layer_config" in config:
        return Eagle3Config.from_dict(config | {"transformer_layer_config": layer})
    nested = config.get("eagle_config") or {}
    return Eagle3Config.from_dict(
        {
            "model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
            "target_hidden_size": config.get("target_hidden_size"),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
            "eagle_aux_hidden_state_layer_ids": nested.get("eagle_aux_hidden_state_layer_ids"),
        }
    )


def layers_read(config: Eagle3Config, num_layers: int) -> list[int]:
    """Return the layers whose outputs a head reads: those before the ones that its config.json names.

    Args:
        config: Of the head.
        num_layers: Layers of the target.

    Raises:
        EngineFailed: The target has no such layers.
    """
    named = config.eagle_aux_hidden_state_layer_ids or [2, num_layers // 2, num_layers - 3]
    if len(named) != NUM_READ or not all(1 <= i <= num_layers for i in named):
        raise EngineFailed(
            f"the EAGLE-3 head reads the layers before {named}, and the model has {num_layers}; expected {NUM_READ} "
            f"from 1 to {num_layers}"
        )
    return [i - 1 for i in named]


def _scaling(text: Any) -> dict[str, Any] | None:
    scaling = text.rope_parameters
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    return None if kind in (None, "default") else scaling


def _name(name: str) -> str:
    return f"layers.0.{name.removeprefix(FIRST_LAYER)}" if name.startswith(FIRST_LAYER) else name
