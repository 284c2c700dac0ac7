"""Families with sliding windows."""

from tests.support.families.family import (
    EXPERTS,
    GEMMA,
    GEMMA4,
    KV,
    ROTATING,
    SCALED_QUERIES,
    SLIDING_LAYERS,
    STEP,
    WINDOW,
    WINDOWED,
    WINDOWS,
    Family,
    text,
)

WINDOW_FAMILIES: dict[str, Family] = {
    "llama windowed": Family(text("llama", WINDOWS), WINDOWED, seed=1),
    "ministral3": Family(text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), WINDOWED),
    "gemma3_text": Family(text("gemma3_text", GEMMA, rope_theta=1e6), WINDOWED),
    "olmo3": Family(text("olmo3", WINDOWS), WINDOWED),
    "cohere2": Family(
        text("cohere2", sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=4.0), WINDOWED, seed=17
    ),
    "exaone4": Family(text("exaone4", WINDOWS, sliding_window_pattern="LGL"), WINDOWED, seed=1),
    "gpt_oss": Family(text("gpt_oss", EXPERTS, WINDOWS), WINDOWED, seed=1),
    "gemma4_text": Family(text("gemma4_text", GEMMA4), f"{ROTATING} {KV} {ROTATING}", seed=25),
    "mimo_v2_flash": Family(
        text(
            "mimo_v2_flash",
            EXPERTS,
            rms_norm_eps=1e-5,
            hybrid_layer_pattern=[1, 0, 1],
            layer_types=SLIDING_LAYERS,
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
        seed=6,
    ),
    "afmoe": Family(
        text(
            "afmoe",
            EXPERTS,
            WINDOWS,
            num_shared_experts=1,
            num_dense_layers=1,
            route_norm=True,
            route_scale=1.5,
            mup_enabled=True,
        ),
        WINDOWED,
        seed=1,
    ),
    "cohere2_moe": Family(
        text(
            "cohere2_moe",
            EXPERTS,
            sliding_window=WINDOW,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            rms_norm_eps=None,
            sliding_window_pattern=2,
            num_shared_experts=1,
            logit_scale=4.0,
        ),
        f"{KV}*2 {ROTATING}",
        seed=3,
    ),
    "exaone_moe": Family(
        text("exaone_moe", EXPERTS, WINDOWS, num_shared_experts=1, is_moe_layer=[False, True, True]), WINDOWED
    ),
    "flint": Family(text("flint", EXPERTS, WINDOWS, no_rope_layer_indices=[1]), WINDOWED),
    "iquestloopcoder": Family(text("iquestloopcoder", loop_window_size=WINDOW), f"{KV}*3 {ROTATING}*3", seed=5),
    "kolibri1": Family(text("kolibri1", EXPERTS, WINDOWS), WINDOWED, seed=3),
    "laguna": Family(text("laguna", EXPERTS, WINDOWS, mlp_only_layers=[0]), WINDOWED, seed=2),
    "mellum": Family(
        text(
            "mellum",
            EXPERTS,
            WINDOWS,
            rope_parameters={
                kind: {"rope_theta": 10000.0, "rope_type": "default"}
                for kind in ("full_attention", "sliding_attention")
            },
        ),
        WINDOWED,
    ),
    "spark2_5": Family(
        text(
            "spark2_5",
            WINDOWS,
            rope_parameters={
                "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 10000.0},
            },
        ),
        WINDOWED,
        seed=2,
    ),
    "step3p5": Family(text("step3p5", WINDOWS, STEP, moe_layers_enum="1,2"), WINDOWED),
    "limite": Family(
        text(
            "limite",
            rms_norm_eps=None,
            layer_norm_eps=None,
            norm_eps=None,
            attention_softmax_scale=0.25,
            attn_gate_channels=16,
            ve_dim=16,
            ve_layers=[0, 2],
            xsa_layers=[0, 1],
            global_layers=[1],
            sliding_window=WINDOW,
            rope_n_pairs=4,
            mudd_layers=[1, 2],
            mudd_tap_idx={"1": [0, 1], "2": [0, 1, 2]},
            softcap_logits={"kind": "sigmoid", "a": 15.0, "b": 0.0, "c": 1.0},
        ),
        f"{KV}*3",
        seed=12,
    ),
}
