"""The zoo's table: one tiny configuration per model family that mlx_vlm loads, with the caches that its layers have.

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
SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"layer_types": SLIDING_LAYERS, "sliding_window": WINDOW}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2}
GEMMA4: dict[str, Any] = {
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


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config: config.json.
        caches: Class names of the layers' caches, space-separated, "KVCache*3" for three.
        quantization: Parameters of mlx.nn.quantize; None without.
        seed: Of the random weights; chosen so that the two best tokens are never nearly equal.
    """

    config: dict[str, Any]
    caches: str
    quantization: dict[str, Any] | None = None
    seed: int = 0

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

FAMILIES: dict[str, Family] = {
    # Keys and values of all tokens
    "llama": Family(text("llama"), f"{KV}*3", seed=3),
    "mistral": Family(text("mistral", num_key_value_heads=1), f"{KV}*3"),
    "qwen2": Family(text("qwen2"), f"{KV}*3", seed=1),
    "qwen3": Family(text("qwen3"), f"{KV}*3", seed=1),
    "gemma": Family(text("gemma"), f"{KV}*3", seed=11),
    "gemma2": Family(text("gemma2", GEMMA), f"{KV}*3", seed=7),
    "phi": Family(text("phi", num_key_value_heads=4, partial_rotary_factor=0.5), f"{KV}*3", seed=1),
    "phi3": Family(text("phi3"), f"{KV}*3"),
    "granite": Family(text("granite", GRANITE), f"{KV}*3", seed=3),
    "olmo2": Family(text("olmo2"), f"{KV}*3", seed=1),
    "glm": Family(text("glm"), f"{KV}*3", seed=2),
    "glm4": Family(text("glm4", partial_rotary_factor=0.5), f"{KV}*3"),
    "starcoder2": Family(text("starcoder2"), f"{KV}*3", seed=2),
    "smollm3": Family(text("smollm3", no_rope_layer_interval=2), f"{KV}*3", seed=1),
    "cohere": Family(text("cohere", logit_scale=4.0), f"{KV}*3"),
    "stablelm": Family(text("stablelm", partial_rotary_factor=0.5, use_qkv_bias=False), f"{KV}*3", seed=10),
    "seed_oss": Family(text("seed_oss"), f"{KV}*3", seed=3),
    "ernie4_5": Family(text("ernie4_5", use_bias=False), f"{KV}*3", seed=2),
    "hunyuan_v1_dense": Family(
        text("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}), f"{KV}*3", seed=2
    ),
    # Experts
    "qwen2_moe": Family(text("qwen2_moe", EXPERTS), f"{KV}*3", seed=1),
    "qwen3_moe": Family(text("qwen3_moe", EXPERTS), f"{KV}*3"),
    "olmoe": Family(text("olmoe", EXPERTS), f"{KV}*3"),
    "mixtral": Family(text("mixtral", EXPERTS), f"{KV}*3"),
    "granitemoe": Family(text("granitemoe", EXPERTS, GRANITE), f"{KV}*3", seed=1),
    "glm4_moe": Family(text("glm4_moe", EXPERTS, use_qk_norm=True, partial_rotary_factor=0.5), f"{KV}*3", seed=6),
    "minimax": Family(text("minimax", EXPERTS, shared_intermediate_size=32, rotary_dim=8), f"{KV}*3", seed=2),
    # Latent attention
    "deepseek_v2": Family(text("deepseek_v2", EXPERTS, LATENT, rope_scaling=YARN), f"{KV}*3", seed=1),
    "deepseek_v3": Family(text("deepseek_v3", EXPERTS, LATENT), f"{KV}*3"),
    "glm4_moe_lite": Family(text("glm4_moe_lite", EXPERTS, LATENT), f"{KV}*3"),
    "minicpm3": Family(
        text(
            "minicpm3",
            LATENT,
            dim_model_base=64,
            scale_depth=1.4,
            scale_emb=4,
            rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        ),
        f"{KV}*3",
        seed=4,
    ),
    # Sliding windows
    "llama windowed": Family(text("llama", WINDOWS), WINDOWED, seed=1),
    "ministral3": Family(text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), WINDOWED),
    "gemma3_text": Family(text("gemma3_text", GEMMA), WINDOWED),
    "olmo3": Family(text("olmo3", WINDOWS), WINDOWED),
    "cohere2": Family(
        text("cohere2", sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=4.0), WINDOWED, seed=17
    ),
    "exaone4": Family(text("exaone4", sliding_window=WINDOW, sliding_window_pattern="LGL"), WINDOWED, seed=1),
    "gpt_oss": Family(text("gpt_oss", EXPERTS, WINDOWS), WINDOWED, seed=1),
    "gemma4_text": Family(text("gemma4_text", GEMMA4), f"{ROTATING} {KV} {ROTATING}", seed=25),
    "mimo_v2_flash": Family(
        text(
            "mimo_v2_flash",
            EXPERTS,
            hybrid_layer_pattern=[1, 0, 1],
            moe_layer_freq=[0, 1, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            layernorm_epsilon=1e-6,
            swa_rope_theta=10000.0,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            v_head_dim=16,
            swa_head_dim=16,
            swa_v_head_dim=16,
            partial_rotary_factor=0.5,
            n_shared_experts=None,
        ),
        WINDOWED,
        seed=3,
    ),
    # Recurrent layers among attention
    "qwen3_next": Family(text("qwen3_next", EXPERTS, GATED_DELTA, partial_rotary_factor=0.25), RECURRENT, seed=0),
    "qwen3_5_text": Family(text("qwen3_5_text", GATED_DELTA), RECURRENT, seed=0),
    "qwen3_5_moe_text": Family(text("qwen3_5_moe_text", EXPERTS, GATED_DELTA), RECURRENT, seed=13),
    "kimi_linear": Family(
        text(
            "kimi_linear",
            EXPERTS,
            LATENT,
            q_lora_rank=None,
            model_max_length=4096,
            num_experts_per_token=2,
            num_shared_experts=1,
            mla_use_nope=True,
            linear_attn_config={
                "kda_layers": [1, 2],
                "full_attn_layers": [3],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        ),
        RECURRENT,
        seed=7,
    ),
    "granitemoehybrid": Family(
        text(
            "granitemoehybrid",
            EXPERTS,
            GRANITE,
            MAMBA,
            shared_intermediate_size=64,
            layer_types=["mamba", "attention", "mamba"],
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=2,
    ),
    "nemotron_h": Family(
        text(
            "nemotron_h",
            EXPERTS,
            mamba_num_heads=4,
            mamba_head_dim=16,
            mamba_proj_bias=False,
            ssm_state_size=32,
            conv_kernel=4,
            n_groups=1,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            hybrid_override_pattern=["M", "*", "-", "M", "E"],
            num_hidden_layers=5,
            moe_shared_expert_intermediate_size=32,
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=2,
    ),
    "lfm2": Family(
        text(
            "lfm2",
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_ff_dim=128,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1],
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=1,
    ),
    "lfm2_moe": Family(
        text(
            "lfm2_moe",
            EXPERTS,
            conv_bias=False,
            conv_L_cache=3,
            use_expert_bias=True,
            num_dense_layers=1,
            full_attn_idxs=[1],
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=5,
    ),
    "jamba": Family(
        text(
            "jamba",
            EXPERTS,
            MAMBA,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=2,
    ),
    # Recurrent layers alone
    "mamba": Family(
        text(
            "mamba",
            intermediate_size=128,
            state_size=16,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        ),
        f"{ARRAYS}*3",
    ),
    "mamba2": Family(
        text(
            "mamba2",
            num_heads=8,
            head_dim=16,
            state_size=32,
            layer_norm_epsilon=1e-5,
            conv_kernel=4,
            n_groups=1,
            use_bias=False,
            use_conv_bias=True,
            time_step_limit=[0.001, 100.0],
            time_step_rank=4,
            intermediate_size=128,
        ),
        f"{ARRAYS}*3",
    ),
    "rwkv7": Family(
        text("rwkv7", head_dim=32, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
        f"{ARRAYS}*3",
        seed=5,
    ),
    # Attention and recurrence in one layer, attention with an index
    "falcon_h1": Family(text("falcon_h1", MAMBA, mamba_d_ssm=64, lm_head_multiplier=1.0), "CacheList*3", seed=14),
    "deepseek_v32": Family(
        text("deepseek_v32", EXPERTS, LATENT, index_head_dim=32, index_n_heads=2, index_topk=WINDOW),
        "CacheList*3",
        seed=5,
    ),
    # Three rope positions per token
    "qwen2_vl": Family(text("qwen2_vl", MROPE, vision_config=QWEN_VISION), f"{KV}*3", seed=1),
    "qwen2_5_vl": Family(text("qwen2_5_vl", MROPE, vision_config=QWEN_VISION), f"{KV}*3", seed=1),
    "qwen3_vl": Family(vlm("qwen3_vl", text("qwen3_vl_text", MROPE), QWEN_VISION), f"{KV}*3", seed=1),
    "qwen3_vl_moe": Family(vlm("qwen3_vl_moe", text("qwen3_vl_moe_text", EXPERTS, MROPE), QWEN_VISION), f"{KV}*3"),
    "qwen3_5": Family(vlm("qwen3_5", text("qwen3_5_text", GATED_DELTA), QWEN_VISION), RECURRENT, seed=0),
    "qwen3_5_moe": Family(
        vlm("qwen3_5_moe", text("qwen3_5_moe_text", EXPERTS, GATED_DELTA), QWEN_VISION), RECURRENT, seed=13
    ),
    # Language models of other vision models
    "llava": Family(vlm("llava", text("llama"), TOWER | {"model_type": "clip_vision_model"}), f"{KV}*3", seed=3),
    "idefics3": Family(vlm("idefics3", text("llama"), TOWER), f"{KV}*3"),
    "pixtral": Family(vlm("pixtral", text("mistral"), TOWER), f"{KV}*3", seed=3),
    "mistral3": Family(
        vlm("mistral3", text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), TOWER | {"model_type": "pixtral"}),
        WINDOWED,
    ),
    "gemma3": Family(
        vlm("gemma3", text("gemma3_text", GEMMA), TOWER | {"model_type": "siglip_vision_model", "image_size": 128}),
        WINDOWED,
    ),
    "gemma4": Family(
        vlm("gemma4", text("gemma4_text", GEMMA4), TOWER | {"model_type": "gemma4_vision"}), WINDOWED, seed=13
    ),
    # Quantized
    "qwen3 4-bit": Family(text("qwen3"), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "affine"}, seed=1),
    "qwen3 8-bit": Family(text("qwen3"), f"{KV}*3", {"group_size": 64, "bits": 8, "mode": "affine"}, seed=1),
    "qwen3 mxfp4": Family(text("qwen3"), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, seed=3),
    "qwen3 nvfp4": Family(text("qwen3"), f"{KV}*3", {"group_size": 16, "bits": 4, "mode": "nvfp4"}, seed=1),
    "qwen3_moe 4-bit": Family(
        text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "affine"}, seed=2
    ),
    "qwen3_moe 8-bit": Family(text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 8, "mode": "affine"}),
    "qwen3_moe mxfp4": Family(
        text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, seed=3
    ),
}

UNSOUND: dict[str, str] = {
    "gemma3n": "mlx_vlm 0.7.10 loads no checkpoint without the vision tower, of a fixed size of 300 million parameters "
    "(KeyError: 'vision_tower.timm_model.blocks.0.0.conv_exp.weight')",
}
"""Families that have no place in the zoo, and what was measured."""


def families_table() -> str:
    """Return the table of engine/README.md: the families of the zoo by the caches of their layers."""
    rows: dict[str, list[str]] = {kind: [] for kind in ("windows", "recurrent", "several", "all")}
    for name, family in FAMILIES.items():
        kinds = set(family.cache_names)
        if family.quantization is not None:
            continue
        kind = "several" if "CacheList" in kinds else "recurrent" if ARRAYS in kinds else "all"
        rows["windows" if ROTATING in kinds else kind].append(f"`{name}`")
    named = {
        "all": "keys and values of all tokens, latent attention and experts included",
        "windows": "sliding windows",
        "recurrent": "recurrent layers",
        "several": "several caches in one layer",
    }
    lines = [f"| {text} | {', '.join(rows[kind])} |" for kind, text in named.items()]
    return "\n".join(["| state of the layers | families |", "|---|---|", *lines])
