"""Random assistants of Gemma 4 for the zoo's checkpoints, as they are published, and the library's own."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import KVCache, make_prompt_cache
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel, ModelConfig

from engine.worker.language_model import config_of
from tests.support.zoo import drawn, new_module

NUM_CENTROIDS, NUM_CHOSEN = 32, 4
"""Clusters of the vocabulary, and those whose tokens have logits of their own."""


def assistant_config(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return config.json of an assistant for a checkpoint, with changes; those of `text_config` are added to it."""
    config = json.loads((model_dir / "config.json").read_text())
    target = config_of(new_module(copy.deepcopy(config)).language_model)
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "global_head_dim": target.global_head_dim,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": target.sliding_window,
        "rope_parameters": target.rope_parameters,
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab_size,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": True,
        "num_centroids": NUM_CENTROIDS,
        "centroid_intermediate_top_k": NUM_CHOSEN,
        "tie_word_embeddings": True,
        "text_config": text | changes.pop("text_config", {}),
        **changes,
    }


def write_assistant(model_dir: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random assistant that fits a checkpoint into `<model>-assistant`; return it."""
    config = assistant_config(model_dir, **changes)
    module = Gemma4AssistantDraftModel(ModelConfig.from_dict(copy.deepcopy(config)))
    rng = np.random.default_rng(seed)
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]
    weights = {name: drawn(rng, name, weight) for name, weight in sorted(parameters.items())}
    if "masked_embedding.token_ordering" in weights:
        order = rng.permutation(config["text_config"]["vocab_size"])
        weights["masked_embedding.token_ordering"] = mx.array(order, mx.int64)
    out = model_dir.parent / f"{model_dir.name}-assistant"
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


class LibraryAssistant:
    """The library's assistant of one sequence, which reads the target's keys and values of a forward without a cache.

    Args:
        head_dir: Where it is.
        language_model: The library's language model of the target.
    """

    def __init__(self, head_dir: Path, language_model: Any):
        self._model = Gemma4AssistantDraftModel(
            ModelConfig.from_dict(json.loads((head_dir / "config.json").read_text()))
        )
        weights: Any = mx.load(str(head_dir / "model.safetensors"))
        self._model.load_weights(list(self._model.sanitize(weights).items()))
        self._model.bind(language_model)
        self._lm = language_model

    def drafts(self, before: list[int], newest: int, num_drafts: int) -> list[int]:
        """Return the best drafts after a token. before: all tokens before it."""
        cache: Any = [KVCache() for _ in make_prompt_cache(self._lm)]  # also of layers with a window, which masks have
        hidden = self._lm.model(mx.array([before], mx.int32), cache=cache)[:, -1:]
        kinds = config_of(self._lm).layer_types[: len(cache)]
        length = len(before)
        shared = {
            kind: (layer.keys[..., :length, :], layer.values[..., :length, :])
            for kind, layer in zip(kinds, cache, strict=True)
        }
        self._model.set_shared_kv(shared, length, position=length - 1, kv_valid_len=length)
        block = self._model.draft_block(newest, hidden, None, num_drafts + 1, lambda logits: mx.argmax(logits, axis=-1))
        found: Any = block.tolist()
        return found[0]
