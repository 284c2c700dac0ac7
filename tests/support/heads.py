"""Random MTP heads for the zoo's checkpoints, in the forms in which they are published."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import nemotron_h_mtp, qwen3_5_mtp
from mlx_vlm.speculative.drafters.eagle3.eagle3 import Eagle3DraftModel

from engine.worker.head_loader import LIBRARY_FORMATS
from engine.worker.heads.eagle3 import eagle3_config
from engine.worker.heads.gemma4 import GEMMA4_FORMATS
from engine.worker.heads.nemotron import NEMOTRON_FORMATS
from engine.worker.heads.nextn import NEXTN_FORMATS, NextnHead
from engine.worker.heads.qwen import QWEN_FORMATS
from tests.support.gemma4_assistant import write_assistant
from tests.support.indexed_heads import hy_v4_module, published_hy_v4, published_qwen4, qwen4_module
from tests.support.published_heads import deepseek_v4_tensors, glm5_next_tensors
from tests.support.zoo import drawn, new_module

PUBLISHED = {"deepseek_v4": deepseek_v4_tensors, "glm5_next": glm5_next_tensors}


def write_head(model_dir: Path, seed: int = 0) -> Path:
    """Write a random head that fits a checkpoint into a directory of its own, `<model>-mtp`; return it.

    Those of Qwen3, of Nemotron-H and of HY V4, which is published with 8 bits, have the split form, the others the
    published one. That of Gemma 4 is its assistant, in `<model>-assistant`.
    """
    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] in GEMMA4_FORMATS:
        return write_assistant(model_dir, seed)
    out = model_dir.parent / f"{model_dir.name}-mtp"
    out.mkdir()
    if config["model_type"] in NEXTN_FORMATS:
        weights, head_config = dict(_published_layer(config, seed)), config
    elif config["model_type"] == "qwen4_exp":
        weights, head_config = published_qwen4(_drawn(qwen4_module(config), seed)), config
    elif config["model_type"] == "hy_v4":
        weights = _drawn(hy_v4_module(config), seed)
        head_config = {"model_type": "hy_v4_mtp", "text_config": config}
    elif config["model_type"] in LIBRARY_FORMATS:
        language_model = new_module(copy.deepcopy(config)).language_model
        drawn_weights = _drawn(LIBRARY_FORMATS[config["model_type"]].new_head(language_model), seed)
        weights, head_config = dict(PUBLISHED[config["model_type"]](drawn_weights, config)), config
    elif config["model_type"] in NEMOTRON_FORMATS:
        layers = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
        text_config = (config.get("text_config") or config) | layers
        head_config = {"model_type": "nemotron_h_mtp", "text_config": text_config}
        made = nemotron_h_mtp.ModelConfig.from_dict(copy.deepcopy(head_config))
        weights = _drawn(nemotron_h_mtp.Model(made), seed)
    else:
        text_config = QWEN_FORMATS[config["model_type"]].splitter().read_text_config(config)
        head_config = {"model_type": "qwen3_5_mtp", "text_config": text_config | {"mtp_num_hidden_layers": 1}}
        weights = _drawn(qwen3_5_mtp.Model(qwen3_5_mtp.ModelConfig.from_dict(copy.deepcopy(head_config))), seed)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(head_config))
    return out


def _drawn(module: Any, seed: int) -> dict[str, mx.array]:
    rng = np.random.default_rng(seed)
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]
    return {name: drawn(rng, name, weight) for name, weight in sorted(parameters.items())}


def _published_layer(config: dict[str, Any], seed: int) -> Iterator[tuple[str, mx.array]]:
    """Yield a random head's tensors as DeepSeek and Z.ai publish them, with the copies of what the target has too."""
    weights = _drawn(NextnHead(new_module(copy.deepcopy(config)).language_model), seed)
    prefix = f"model.layers.{config['num_hidden_layers']}."
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if part in names:
            yield f"{prefix}{names[part]}.{rest}", weight
        elif ".switch_mlp." in rest:
            for i in range(weight.shape[0]):
                yield prefix + rest.replace(".switch_mlp.", f".experts.{i}."), weight[i]
        elif rest == "self_attn.embed_q.weight":
            values = weights["layer.self_attn.unembed_out.weight"]
            both = mx.concatenate([weight.swapaxes(-1, -2), values], axis=1)
            yield f"{prefix}self_attn.kv_b_proj.weight", both.reshape(-1, both.shape[-1])
        elif rest != "self_attn.unembed_out.weight":
            yield prefix + rest, weight
    copies = mx.zeros((config["vocab_size"], config["hidden_size"]))
    yield f"{prefix}embed_tokens.weight", copies
    yield f"{prefix}shared_head.head.weight", copies
    yield f"{prefix}self_attn.rotary_emb.inv_freq", mx.zeros(4)


EAGLE3_LAYERS = [1, 2, 3]
"""Before which layers of the zoo's models the head reads; they have three."""


def write_eagle3(model_dir: Path, for_sglang: bool, draft_vocab_size: int | None = None, seed: int = 0) -> Path:
    """Write a random EAGLE-3 head for a checkpoint into a directory of its own; return it.

    Args:
        model_dir: The checkpoint.
        for_sglang: In the form that SGLang reads, without an embedding; otherwise in that of speculators.
        draft_vocab_size: Tokens that the head knows, some of the target's; None for all.
        seed: Of the weights.
    """
    config = json.loads((model_dir / "config.json").read_text())
    text = config.get("text_config") or config
    known = draft_vocab_size or text["vocab_size"]
    layer = {
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": text["vocab_size"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    if for_sglang:
        llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
        layer["rope_scaling"] = llama3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        ids = {"eagle_aux_hidden_state_layer_ids": EAGLE3_LAYERS}
        head_config = layer | {
            "draft_vocab_size": known,
            "eagle_config": ids,
            "architectures": ["LlamaForCausalLMEagle3"],
        }
    else:
        head_config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": known,
            "eagle_aux_hidden_state_layer_ids": EAGLE3_LAYERS,
            "norm_before_residual": True,
        }
    weights = _drawn(Eagle3DraftModel(eagle3_config(head_config)), seed)
    if "d2t" in weights:
        tokens = np.sort(np.random.default_rng(seed).choice(text["vocab_size"], known, replace=False))
        weights["d2t"] = mx.array(tokens - np.arange(known))
        weights["t2d"] = mx.array(np.isin(np.arange(text["vocab_size"]), tokens).tolist())
    if for_sglang:
        del weights["embed_tokens.weight"]
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    out = model_dir.parent / f"{model_dir.name}-eagle3"
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(head_config))
    return out


def write_published_hy_v4(out: Path, config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Write a random head of HY V4 as published; return it by the names of the library's module, in float32."""
    weights = _drawn(hy_v4_module(config), seed)
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), dict(published_hy_v4(weights)), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return weights


def put_into_checkpoint(model_dir: Path) -> None:
    """Move the head from its own directory into the checkpoint, as `mtp.*` tensors."""
    head_dir = model_dir.parent / f"{model_dir.name}-mtp"
    weights: dict[str, mx.array] = dict(mx.load(str(model_dir / "model.safetensors")))  # type: ignore[arg-type]
    head: dict[str, mx.array] = dict(mx.load(str(head_dir / "model.safetensors")))  # type: ignore[arg-type]
    weights |= {f"mtp.{name}": weight for name, weight in head.items()}
    mx.eval(weights)
    mx.save_safetensors(str(model_dir / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in head_dir.iterdir():
        file.unlink()
    head_dir.rmdir()


def as_raw_head(model_dir: Path) -> dict[str, mx.array]:
    """Return the tensors of a split head as Qwen3-Next's published files name them: experts apart, norms less one."""
    head_dir = model_dir.parent / f"{model_dir.name}-mtp"
    raw: dict[str, mx.array] = {}
    for name, weight in mx.load(str(head_dir / "model.safetensors")).items():  # type: ignore[union-attr]
        if ".switch_mlp." in name:
            for i in range(weight.shape[0]):
                raw["mtp." + name.replace(".switch_mlp.", f".experts.{i}.")] = weight[i]
        else:
            raw[f"mtp.{name}"] = weight - 1.0 if weight.ndim == 1 and "norm" in name else weight
    return raw
