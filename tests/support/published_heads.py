"""Random MTP heads of DeepSeek V4 and GLM-5-Next by the names that mlx_vlm reads in published checkpoints."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def deepseek_v4_tensors(weights: dict[str, mx.array], config: dict[str, Any]) -> Iterator[tuple[str, mx.array]]:
    """Yield the tensors of a DeepseekV4Head, with the copies of what the target has too."""
    for name, weight in weights.items():
        name = name.removeprefix("decoder.").replace("gate.e_score_correction_bias", "gate.bias")
        for part in ("attn", "ffn"):
            name = name.replace(f"{part}_hc.", f"hc_{part}_")
        name = name.replace("hc_head.", "hc_head_")
        kind = name.split(".")[-2] if "." in name else ""
        if "shared_experts." in name:
            name = name.replace(kind, EXPERT_NAMES[kind])
        if "switch_mlp." in name:
            for i in range(weight.shape[0]):
                yield f"mtp.0.ffn.experts.{i}.{EXPERT_NAMES[kind]}.weight", weight[i]
        else:
            yield f"mtp.0.{name}", weight.flatten(0, 1) if kind == "wo_a" else weight
    copies = mx.zeros((config["vocab_size"], config["hidden_size"]))
    yield from (("mtp.0.emb.tok_emb.weight", copies), ("mtp.0.head.weight", copies))


def glm5_next_tensors(weights: dict[str, mx.array], config: dict[str, Any]) -> Iterator[tuple[str, mx.array]]:
    """Yield the tensors of a Glm5NextHead, with the copies of what the target has too."""
    text = config["text_config"]
    prefix = f"model.language_model.layers.{text['num_hidden_layers']}."
    for name, weight in weights.items():
        own = prefix + name.removeprefix("mtp_block.").replace("shared_head_norm", "shared_head.norm")
        if ".switch_mlp." in own:
            yield from ((own.replace(".switch_mlp.", f".experts.{i}."), weight[i]) for i in range(weight.shape[0]))
        elif ".gate_up_proj." in own:
            for part, half in zip(("gate_proj", "up_proj"), mx.split(weight, 2), strict=True):
                yield own.replace("gate_up_proj", part), half
        elif ".qkv_a_proj." in own:
            queries, latents = mx.split(weight, [text["q_lora_rank"]])
            yield own.replace("qkv_a_proj", "q_a_proj"), queries
            yield own.replace("qkv_a_proj", "kv_a_proj_with_mqa"), latents
        elif ".embed_q." in own:
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([weight.swapaxes(-1, -2), values], axis=1)
            yield own.replace("embed_q", "kv_b_proj"), both.reshape(-1, both.shape[-1])
        elif ".unembed_out." not in own:
            yield own, weight
    copies = mx.zeros((text["vocab_size"], text["hidden_size"]))
    yield from ((f"{prefix}embed_tokens.weight", copies), (f"{prefix}shared_head.head.weight", copies))
