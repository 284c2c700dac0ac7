"""A family of the zoo: a tiny configuration with the caches that its layers have, and parts of configurations.

Recurrent states have dimensions of at least 32: Metal's kernels divide them among the 32 threads of a simdgroup, and
give other tokens with fewer. Real models have 64 or more.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

VOCAB_SIZE = 512
WINDOW = 8  # tokens; prompts of the tests are five times as long

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
}
DEFAULT_BASE: dict[str, Any] = {"rope_theta": 100000.0}
"""The base with which mlx-vlm computes Qwen3.5 where config.json has no `rope_parameters`."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
GRANITE: dict[str, Any] = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 1.0,
}
FALCON_H1: dict[str, Any] = {
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.390625,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
}
"""mlx-vlm's defaults, those of Falcon-H1 1.5B; transformers has others."""
SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"layer_types": SLIDING_LAYERS, "sliding_window": WINDOW}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2}
GEMMA4: dict[str, Any] = {
    "final_logit_softcapping": 30.0,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 1,
    "tie_word_embeddings": True,
}
YARN: dict[str, Any] = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
SCALED_QUERIES: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}
MROPE: dict[str, Any] = {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [0],
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP: dict[str, Any] = TOWER | {"model_type": "siglip_vision_model"}
NEMOTRON_H: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": ["M", "*", "-", "M", "E"],
    "num_hidden_layers": 5,
    "moe_shared_expert_intermediate_size": 32,
}
PLAMO2: dict[str, Any] = {
    "hidden_size_per_head": 16,
    "attention_window_size": WINDOW,
    "full_attention_idx": [],
    "rope_local_theta": 10000.0,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_num_heads": 4,
    "mamba_step": 2,
}
STEP: dict[str, Any] = {
    "moe_router_scaling_factor": 3.0,
    "num_attention_groups": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 2,
        "num_attention_groups": 1,
        "head_dim": 16,
    },
}
KIMI_LINEAR: dict[str, Any] = {
    "kda_layers": [1, 2],
    "full_attn_layers": [3],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config: config.json.
        caches: Class names of the layers' caches, space-separated, "KVCache*3" for three.
        quantization: Parameters of mlx.nn.quantize; None without.
        seed: Of the random weights; chosen so that the two best tokens are never nearly equal.
        has_bare_names: Whether the checkpoint names its weights as the hub does; the library takes no others.
    """

    config: dict[str, Any]
    caches: str
    quantization: dict[str, Any] | None = None
    seed: int = 0
    has_bare_names: bool = False

    @property
    def cache_names(self) -> list[str]:
        """Class names of the layers' caches, one per layer."""
        split = [one.partition("*") for one in self.caches.split()]
        return [name for name, _, count in split for _ in range(int(count or 1))]

    @property
    def layout(self) -> tuple[tuple[str, ...], bool, bool]:
        """The kinds of caches in the order of the layers, whether there are experts, whether weights are quantized."""
        kinds = tuple(name for name, _ in groupby(self.cache_names))
        has_experts = not {"num_experts", "num_local_experts", "n_routed_experts"}.isdisjoint(self.config)
        return kinds, has_experts, self.quantization is not None


def text(model_type: str, *more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A flat config.json."""
    config: dict[str, Any] = dict(SIZES)
    for part in (*more, changes):
        config |= part
    return {"model_type": model_type, **config}


def vlm(model_type: str, text_config: dict[str, Any], vision_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config.json with a vision tower; the checkpoint has weights for the language model alone."""
    vision = {"model_type": model_type, **vision_config}
    return {"model_type": model_type, "text_config": text_config, "vision_config": vision, **more}


KV, ROTATING, ARRAYS = "KVCache", "RotatingKVCache", "ArraysCache"
WINDOWED = f"{ROTATING} {KV} {ROTATING}"
RECURRENT = f"{ARRAYS} {ARRAYS} {KV}"
