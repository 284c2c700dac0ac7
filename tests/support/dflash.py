"""Random DFlash drafters for the zoo's checkpoints, as they are published, and the library's own."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel, ModelConfig

from tests.support.zoo import drawn

BLOCK_SIZE, WINDOW = 8, 12
"""Longest block and window of the drafters; one of their two layers has the window."""
LAYERS_READ = [0, 2]
"""Layers of the target whose outputs the drafters read; the zoo's models have three layers."""


def dflash_config(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return config.json of a drafter for a checkpoint, with changes; those of `dflash_config` are added to it."""
    config = json.loads((model_dir / "config.json").read_text())
    text = config.get("text_config") or config
    own = {"mask_token_id": 5, "target_layer_ids": LAYERS_READ} | changes.pop("dflash_config", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": text["vocab_size"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "num_target_layers": text["num_hidden_layers"],
        "block_size": BLOCK_SIZE,
        "dflash_config": own,
        **changes,
    }


def write_dflash(model_dir: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random drafter that fits a checkpoint into a directory of its own; return it."""
    config = dflash_config(model_dir, **changes)
    module = DFlashDraftModel(ModelConfig.from_dict(copy.deepcopy(config)))
    rng = np.random.default_rng(seed)
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]
    weights = {name: drawn(rng, name, weight) for name, weight in sorted(parameters.items())}
    out = model_dir.parent / f"{model_dir.name}-dflash"
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


class LibraryDrafter:
    """The library's drafter of one sequence.

    Args:
        head_dir: Where it is.
        language_model: The library's language model of the target.
    """

    def __init__(self, head_dir: Path, language_model: Any):
        self._model = DFlashDraftModel(ModelConfig.from_dict(json.loads((head_dir / "config.json").read_text())))
        weights: Any = mx.load(str(head_dir / "model.safetensors"))
        self._model.load_weights(list(weights.items()))
        self._model.bind(language_model)

    def drafts(self, newest: int, read: mx.array, num_drafts: int) -> list[int]:
        """Return the best drafts after a token. read: [1, L, width], what is read of all tokens before it."""
        block = self._model.draft_block(
            newest, read, self._model.make_cache(), num_drafts + 1, lambda logits: mx.argmax(logits, axis=-1)
        )
        found: Any = block.tolist()
        return found[0]
