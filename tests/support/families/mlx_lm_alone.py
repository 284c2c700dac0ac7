"""Families that mlx_lm alone implements."""

from tests.support.families.family import (
    EXPERTS,
    GATED_DELTA,
    KV,
    LATENT,
    RECURRENT,
    Family,
    text,
)

MLX_LM_FAMILIES: dict[str, Family] = {
    "gptj": Family(
        text("gptj", n_embd=64, layer_norm_epsilon=1e-5, n_positions=1024, n_head=4, rotary_dim=8, n_layer=3),
        f"{KV}*3",
        seed=2,
    ),
    "nanbeige": Family(text("nanbeige", num_loops=2), f"{KV}*6", seed=1),
    "talkie": Family(text("talkie"), f"{KV}*3", seed=3),
    "olmo_hybrid": Family(
        text(
            "olmo_hybrid",
            GATED_DELTA,
            linear_allow_neg_eigval=True,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
        ),
        RECURRENT,
        seed=1,
    ),
    "bailing_hybrid": Family(
        text(
            "bailing_hybrid", EXPERTS, LATENT, num_shared_experts=1, layer_group_size=3, group_norm_size=2, head_dim=32
        ),
        RECURRENT,
    ),
    "bailing_moe_v3": Family(
        text(
            "bailing_moe_v3",
            EXPERTS,
            LATENT,
            num_shared_experts=1,
            layer_group_size=3,
            head_dim=32,
            moe_shared_expert_intermediate_size=32,
        ),
        RECURRENT,
        seed=5,
    ),
}
