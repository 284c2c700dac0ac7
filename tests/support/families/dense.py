"""Families whose layers keep the keys and values of all tokens, without experts."""

from tests.support.families.family import (
    GEMMA,
    GRANITE,
    KV,
    VOCAB_SIZE,
    Family,
    text,
)

DENSE: dict[str, Family] = {
    "llama": Family(text("llama"), f"{KV}*3", seed=3),
    "mistral": Family(text("mistral", num_key_value_heads=1), f"{KV}*3"),
    "qwen2": Family(text("qwen2"), f"{KV}*3", seed=1),
    "qwen3": Family(text("qwen3"), f"{KV}*3", seed=1),
    "gemma": Family(text("gemma"), f"{KV}*3", seed=11),
    "gemma2": Family(text("gemma2", GEMMA, sliding_window=4096), f"{KV}*3", seed=7),
    "phi": Family(text("phi", num_key_value_heads=4, partial_rotary_factor=0.5), f"{KV}*3", seed=1),
    "phi3": Family(text("phi3"), f"{KV}*3"),
    "granite": Family(text("granite", GRANITE), f"{KV}*3", seed=3),
    "olmo2": Family(text("olmo2"), f"{KV}*3", seed=1),
    "glm": Family(text("glm"), f"{KV}*3", seed=0),
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
    "apertus": Family(text("apertus", post_norm=False, qk_norm=True), f"{KV}*3", seed=2),
    "exaone": Family(text("exaone", num_layers=3, layer_norm_epsilon=1e-5), f"{KV}*3", seed=2),
    "gpt2": Family(
        text(
            "gpt2",
            n_ctx=1024,
            n_embd=64,
            n_head=4,
            n_layer=3,
            n_positions=1024,
            layer_norm_epsilon=1e-5,
            num_key_value_heads=4,
        ),
        f"{KV}*3",
        seed=1,
        has_bare_names=True,
    ),
    "gpt_bigcode": Family(
        text(
            "gpt_bigcode",
            n_embd=64,
            n_head=4,
            n_layer=3,
            n_inner=128,
            n_positions=1024,
            layer_norm_epsilon=1e-5,
            num_key_value_heads=1,
        ),
        f"{KV}*3",
        seed=1,
    ),
    "gpt_neox": Family(
        text("gpt_neox", rotary_emb_base=10000, rotary_pct=0.5, num_key_value_heads=4),
        f"{KV}*3",
        seed=3,
        has_bare_names=True,
    ),
    "helium": Family(text("helium"), f"{KV}*3", seed=2),
    "hrm_text": Family(
        text("hrm_text", num_hidden_layers=1, num_key_value_heads=4, embedding_scale=2.0, H_cycles=2, L_cycles=1),
        f"{KV}*4",
    ),
    "internlm2": Family(text("internlm2", bias=False), f"{KV}*3", seed=2),
    "internlm3": Family(text("internlm3"), f"{KV}*3", seed=3),
    "k2_horizon": Family(text("k2_horizon"), f"{KV}*3", seed=3),
    "lille_130m": Family(text("lille_130m", block_size=1024, n_embd=64, n_head=4, n_kv_heads=2, n_layer=3), f"{KV}*3"),
    "llama4_text": Family(
        text("llama4_text", intermediate_size_mlp=128, no_rope_layers=[1, 0, 1], use_qk_norm=True), f"{KV}*3", seed=3
    ),
    "mimo": Family(text("mimo", num_nextn_predict_layers=0), f"{KV}*3", seed=1),
    "minicpm": Family(
        text("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=4), f"{KV}*3", seed=5, has_bare_names=True
    ),
    "nanochat": Family(text("nanochat", num_key_value_heads=4), f"{KV}*3"),
    "nemotron": Family(text("nemotron", hidden_act="relu2", partial_rotary_factor=0.5), f"{KV}*3", seed=2),
    "nemotron_labs_diffusion": Family(text("nemotron_labs_diffusion"), f"{KV}*3", seed=3),
    "nemotron_nas": Family(
        text(
            "nemotron_nas",
            num_hidden_layers=4,
            block_configs=[
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
            ],
        ),
        f"{KV}*3",
        seed=6,
    ),
    "olmo": Family(
        text("olmo", d_model=64, n_layers=3, n_heads=4, embedding_size=VOCAB_SIZE, mlp_hidden_size=128),
        f"{KV}*3",
        seed=4,
    ),
    "openelm": Family(
        text(
            "openelm",
            num_transformer_layers=3,
            model_dim=64,
            ffn_dim_divisor=32,
            num_query_heads=[4, 4, 4],
            num_kv_heads=[2, 2, 2],
            ffn_multipliers=[1.0, 2.0, 2.0],
        ),
        f"{KV}*3",
        seed=6,
    ),
    "plamo": Family(text("plamo", n_shared_head=2), f"{KV}*3", seed=1),
    "qwen": Family(text("qwen", kv_channels=16, layer_norm_epsilon=1e-6, no_bias=True), f"{KV}*3", seed=3),
    "telechat3": Family(text("telechat3"), f"{KV}*3", seed=3),
}
