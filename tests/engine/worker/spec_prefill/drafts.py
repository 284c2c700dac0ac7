"""Random drafts of several families, made with mlx_vlm's own classes, and importance computed the long way."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args

from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.spec_prefill.draft import Draft, draft_engine_config, load_draft
from tests.support.tiny import Tiny, build

VOCAB_SIZE = 512

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
VISION = {
    "model_type": "qwen3_vl",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 32, **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 4},
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": VISION,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_scaling": {"type": "default", "mrope_section": [6, 5, 5]},
            **SIZES,
        },
    },
}
FAMILIES = ("hybrid", *CONFIGS)


def make(out: Path, family: str, **changes: Any) -> Path:
    """Writes a random checkpoint without a tokenizer; with one if it is `hybrid`. changes: of config.json."""
    if family == "hybrid":
        return build(out, Tiny(layers=4, interval=2, mtp=False, **changes))
    config = CONFIGS.get(family, {"model_type": family, **SIZES}) | changes
    arch: Any = get_model_and_args(copy.deepcopy(config))[0]
    model = arch.Model(arch.ModelConfig.from_dict(copy.deepcopy(config)))
    rng = np.random.default_rng(3)
    flat: Any = tree_flatten(model.parameters())
    weights = {name: mx.array(_drawn(rng, w.shape)) for name, w in sorted(flat)}
    out.mkdir(parents=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def load(path: Path | str, **config: Any) -> Draft:
    settings = SpecPrefillConfig.model_validate({"draft_model": str(path), **config})
    return load_draft(draft_engine_config(settings, "cpu"))


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(12, VOCAB_SIZE, num_tokens).astype(np.int32)


def greedy(draft: Draft, token_ids: np.ndarray, num_tokens: int) -> list[int]:
    """Return the model's own tokens, each by a forward over all tokens before it."""
    said: list[int] = []
    while len(said) < num_tokens:
        ids = np.concatenate([token_ids, said]).astype(np.int32)
        said.append(int(np.array(draft._forward(ids, 0, draft.make_cache()))[0, -1].argmax()))
    return said


def brute_force(draft: Draft, token_ids: np.ndarray, num_steps: int, monkeypatch: Any) -> np.ndarray:
    """One forward over prompt and answer; all scores of all layers from the queries and keys that the model itself
    gives to its attention; in float64."""
    n, recorded = len(token_ids), []
    module = sys.modules[type(draft._lm).__module__]
    attend = vars(module)["scaled_dot_product_attention"]

    def recording(queries: mx.array, keys: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        recorded.append((np.array(queries[0], np.float64), np.array(keys[0], np.float64), kwargs["scale"]))
        return attend(queries, keys, *args, **kwargs)

    answer = greedy(draft, token_ids, num_steps)
    ids = np.concatenate([token_ids, answer[:-1]]).astype(np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(module, "scaled_dot_product_attention", recording)
        mx.eval(draft._forward(ids, 0, draft.make_cache()))
    steps = []
    for step in range(num_steps):
        heads = []
        for queries, keys, scale in recorded:
            for head, query in enumerate(queries[:, n - 1 + step]):
                scores = keys[head * len(keys) // len(queries), :n] @ query * scale
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append([weights[max(i - 6, 0) : i + 7].mean() for i in range(n)])
        steps.append(np.max(heads, axis=0))
    return np.mean(steps, axis=0)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape)
    scaled = 1 + 0.1 * noise if len(shape) == 1 else 1.5 * noise / np.prod(shape[1:]) ** 0.5
    return scaled.astype(np.float32)
