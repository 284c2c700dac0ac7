"""Families with experts or latent attention whose layers keep the keys and values of all tokens."""

from typing import Any

from tests.support.families.family import (
    ARRAYS,
    EXPERTS,
    GRANITE,
    KV,
    LATENT,
    VOCAB_SIZE,
    WINDOW,
    YARN,
    Family,
    text,
)

LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

EXPERT_FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family(text("qwen2_moe", EXPERTS, norm_topk_prob=False), f"{KV}*3", seed=1),
    "qwen3_moe": Family(text("qwen3_moe", EXPERTS), f"{KV}*3"),
    "olmoe": Family(text("olmoe", EXPERTS), f"{KV}*3"),
    "mixtral": Family(text("mixtral", EXPERTS), f"{KV}*3"),
    "granitemoe": Family(text("granitemoe", EXPERTS, GRANITE), f"{KV}*3", seed=1),
    "glm4_moe": Family(text("glm4_moe", EXPERTS, use_qk_norm=True, partial_rotary_factor=0.5), f"{KV}*3", seed=6),
    "minimax": Family(
        text("minimax", EXPERTS, shared_intermediate_size=32, rotary_dim=8, layer_types=["full_attention"] * 3),
        f"{KV}*3",
        seed=2,
    ),
    "deepseek_v2": Family(
        text("deepseek_v2", EXPERTS, LATENT, rope_scaling=YARN, norm_topk_prob=False), f"{KV}*3", seed=1
    ),
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
    "bailing_moe": Family(text("bailing_moe", EXPERTS, num_shared_experts=1, use_qk_norm=True), f"{KV}*3", seed=2),
    "dbrx": Family(
        text(
            "dbrx",
            d_model=64,
            n_layers=3,
            n_heads=4,
            ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ),
        f"{KV}*3",
        seed=3,
    ),
    "deepseek": Family(text("deepseek", EXPERTS, norm_topk_prob=False), f"{KV}*3", seed=1),
    "dots1": Family(text("dots1", EXPERTS), f"{KV}*3"),
    "ernie4_5_moe": Family(
        text(
            "ernie4_5_moe",
            use_bias=False,
            moe_num_experts=4,
            moe_intermediate_size=32,
            moe_k=2,
            moe_layer_start_index=1,
            moe_num_shared_experts=1,
        ),
        f"{KV}*3",
        seed=2,
    ),
    "hunyuan": Family(
        text(
            "hunyuan",
            EXPERTS,
            norm_topk_prob=False,
            num_hidden_layers=2,
            moe_topk=2,
            num_shared_expert=1,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_cla=True,
            cla_share_factor=2,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        ),
        f"{KV}*2",
        seed=3,
    ),
    "klear": Family(text("klear", EXPERTS), f"{KV}*3", seed=5),
    "phimoe": Family(
        text(
            "phimoe",
            EXPERTS,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "short_mscale": 1.0,
                "long_mscale": 1.0,
            },
        ),
        f"{KV}*3",
    ),
    "phixtral": Family(
        text(
            "phixtral",
            rms_norm_eps=None,
            norm_eps=None,
            num_vocab=VOCAB_SIZE,
            model_dim=32,
            num_heads=2,
            num_layers=3,
            rotary_dim=8,
            num_local_experts=4,
        ),
        f"{KV}*3",
    ),
    "solar_open": Family(text("solar_open", EXPERTS, use_qk_norm=True, partial_rotary_factor=0.5), f"{KV}*3", seed=6),
    "longcat_flash": Family(text("longcat_flash", EXPERTS, LATENT, LONGCAT), "CacheList*2", seed=2),
    "longcat_flash_ngram": Family(
        text("longcat_flash_ngram", EXPERTS, LATENT, LONGCAT, ngram_vocab_size_ratio=2), f"{ARRAYS} CacheList*2", seed=5
    ),
    "longcat_flash_sparse": Family(
        text(
            "longcat_flash_sparse",
            EXPERTS,
            LATENT,
            LONGCAT,
            attention_method="LSA",
            index_n_heads=2,
            index_head_dim=32,
            index_topk=WINDOW,
            index_init_tokens=2,
            index_local_tokens=4,
        ),
        "CacheList*2",
        seed=1,
    ),
    "xing4_0": Family(text("xing4_0", EXPERTS, LATENT, hc_mult=2, hc_sinkhorn_iters=3), f"{KV}*3", seed=3),
    "youtu_llm": Family(text("youtu_llm", LATENT), f"{KV}*3", seed=8),
    "deepseek_v32": Family(
        text("deepseek_v32", EXPERTS, LATENT, index_head_dim=32, index_n_heads=2, index_topk=WINDOW),
        "CacheList*3",
        seed=5,
    ),
    "glm_moe_dsa": Family(
        text(
            "glm_moe_dsa",
            EXPERTS,
            LATENT,
            index_head_dim=32,
            index_n_heads=2,
            index_topk=WINDOW,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            moe_layer_freq=1,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        ),
        "CacheList*3",
        seed=5,
    ),
}
