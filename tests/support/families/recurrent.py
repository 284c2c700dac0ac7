"""Families with recurrent layers, alone or among attention."""

from tests.support.families.family import (
    ARRAYS,
    DEFAULT_BASE,
    EXPERTS,
    FALCON_H1,
    GATED_DELTA,
    GRANITE,
    KIMI_LINEAR,
    KV,
    LATENT,
    MAMBA,
    NEMOTRON_H,
    PLAMO2,
    RECURRENT,
    ROTATING,
    WINDOW,
    Family,
    text,
)

RECURRENT_FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(text("qwen3_next", EXPERTS, GATED_DELTA, partial_rotary_factor=0.25), RECURRENT, seed=0),
    "qwen3_5_text": Family(text("qwen3_5_text", GATED_DELTA, DEFAULT_BASE), RECURRENT, seed=0),
    "qwen3_5_moe_text": Family(text("qwen3_5_moe_text", EXPERTS, GATED_DELTA, DEFAULT_BASE), RECURRENT, seed=13),
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
            linear_attn_config=KIMI_LINEAR,
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
            mamba_expand=1,
            time_step_limit=[0.0, float("inf")],
            shared_intermediate_size=64,
            layer_types=["mamba", "attention", "mamba"],
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=2,
    ),
    "nemotron_h": Family(
        text("nemotron_h", EXPERTS, NEMOTRON_H),
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
            layer_types=["conv", "full_attention", "conv"],
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
    "falcon_h1": Family(
        text("falcon_h1", MAMBA, FALCON_H1, mamba_d_ssm=64, lm_head_multiplier=1.0), "CacheList*3", seed=14
    ),
    "bailing_moe_linear": Family(
        text(
            "bailing_moe_linear", EXPERTS, num_shared_experts=1, layer_group_size=3, group_norm_size=2, use_qk_norm=True
        ),
        RECURRENT,
    ),
    "plamo2": Family(text("plamo2", PLAMO2), f"{ARRAYS} {KV} {ARRAYS}", seed=1),
    "recurrent_gemma": Family(
        text(
            "recurrent_gemma",
            conv1d_width=4,
            logits_soft_cap=30.0,
            attention_window_size=WINDOW,
            block_types=["recurrent", "recurrent", "attention"],
            num_key_value_heads=1,
        ),
        f"{ARRAYS} {ARRAYS} {ROTATING}",
        seed=1,
        has_bare_names=True,
    ),
    "baichuan_m1": Family(
        text("baichuan_m1", sliding_window=WINDOW, sliding_window_layers=[0, 2], conv_window=2), "CacheList*3", seed=6
    ),
    "decider2": Family(text("decider2", GATED_DELTA, DEFAULT_BASE), RECURRENT, seed=0),
}
