"""Random MTP heads whose layer has an index, by the names of the library's modules and of published checkpoints."""

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters import hy_v4_mtp, qwen4_exp_mtp

NOT_PACKED = ("norm.weight", "mlp.gate.weight", "eh_proj.weight")
"""Tensors of a published head of HY V4 that have no scales."""


def qwen4_module(config: dict[str, Any]) -> Any:
    """Return the library's head of Qwen4 for the config.json of a checkpoint."""
    text_config = copy.deepcopy(config["text_config"])
    return qwen4_exp_mtp.Model(qwen4_exp_mtp.ModelConfig.from_dict({"text_config": text_config}))


def hy_v4_module(config: dict[str, Any]) -> Any:
    """Return the library's head of HY V4 for the config.json of a checkpoint."""
    return hy_v4_mtp.Model(hy_v4_mtp.ModelConfig.from_dict({"text_config": copy.deepcopy(config)}))


def published_qwen4(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a head's tensors by the names that mlx_vlm's splitter reads: gates and ups of all experts in one."""
    named = {f"mtp.{name}": weight for name, weight in weights.items()}
    experts = "mtp.layers.0.mlp."
    gate, up, down = (named.pop(f"{experts}switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    both = mx.concatenate([gate, up], axis=-2)
    return named | {f"{experts}experts.gate_up_proj": both, f"{experts}experts.down_proj": down}


def published_hy_v4(weights: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """Yield a head's tensors by the names that mlx_vlm's splitter reads: most with 8 bits, and with scales."""
    prefix, latent = "model.mtp_layers.0.", "self_attn.kv_b_proj.weight"
    named = {name.removeprefix("decoder."): weight for name, weight in weights.items()}
    keys, values = named.pop("self_attn.embed_q.weight"), named.pop("self_attn.unembed_out.weight")
    both = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
    named[latent] = both.reshape(-1, both.shape[-1])
    for name, weight in named.items():
        if name == "norm.weight":
            yield f"{prefix}final_layernorm.weight", weight
        elif ".switch_mlp." in name or (weight.ndim == 2 and not name.endswith(NOT_PACKED)):
            own = name.replace(".switch_mlp.", ".experts.")
            own = own.removesuffix(".weight") if ".experts." in own else own
            packed, scales, *_ = mx.quantize(weight, group_size=32, bits=8, mode="mxfp8")
            yield f"{prefix}{own}", packed.view(mx.uint8)
            yield f"{prefix}{own}_scale", scales
        else:
            yield f"{prefix}{name}", weight
