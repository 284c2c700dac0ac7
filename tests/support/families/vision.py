"""Language models of vision models; most checkpoints of the zoo have no weights for the tower."""

from typing import Any

from tests.support.families.family import (
    ARRAYS,
    DEFAULT_BASE,
    EXPERTS,
    GATED_DELTA,
    GEMMA,
    GEMMA4,
    GRANITE,
    KIMI_LINEAR,
    KV,
    LATENT,
    MROPE,
    NEMOTRON_H,
    PLAMO2,
    QWEN_VISION,
    RECURRENT,
    ROTATING,
    SCALED_QUERIES,
    SIGLIP,
    SIZES,
    STEP,
    TOWER,
    VOCAB_SIZE,
    WINDOW,
    WINDOWED,
    WINDOWS,
    Family,
    text,
    vlm,
)

DEEPSEEK_TOWER: dict[str, Any] = TOWER | {"model_type": "vision", "layers": 1, "width": 32, "heads": 2}
DEEPSEEK_PROJECTOR: dict[str, Any] = {"model_type": "mlp_projector", "input_dim": 32, "n_embed": 64}
GLM_TOWER: dict[str, Any] = TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
HALF_ROPE: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
}
PADDLE_ROPE: dict[str, Any] = {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
    "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
}
MINICPM_TOKENS = (
    *("image_token_id", "video_token_id", "image_start_id", "image_end_id", "slice_start_id", "slice_end_id"),
    "newline_id",
)
IN_PHI4_SIGLIP = (
    *("vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "rms_norm_eps", "hidden_size"),
    *("num_key_value_heads", "rope_theta", "rope_scaling"),
)
NOT_IN_GLM_OCR = ("layer_norm_eps", "norm_eps", "mlp_bias", "rope_theta", "rope_scaling")

VISION_FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(text("qwen2_vl", MROPE, vision_config=QWEN_VISION), f"{KV}*3", seed=1),
    "qwen2_5_vl": Family(text("qwen2_5_vl", MROPE, vision_config=QWEN_VISION), f"{KV}*3", seed=1),
    "qwen3_vl": Family(vlm("qwen3_vl", text("qwen3_vl_text", MROPE), QWEN_VISION), f"{KV}*3", seed=1),
    "qwen3_vl_moe": Family(vlm("qwen3_vl_moe", text("qwen3_vl_moe_text", EXPERTS, MROPE), QWEN_VISION), f"{KV}*3"),
    "qwen3_5": Family(vlm("qwen3_5", text("qwen3_5_text", GATED_DELTA, DEFAULT_BASE), QWEN_VISION), RECURRENT, seed=0),
    "qwen3_5_moe": Family(
        vlm("qwen3_5_moe", text("qwen3_5_moe_text", EXPERTS, GATED_DELTA, DEFAULT_BASE), QWEN_VISION),
        RECURRENT,
        seed=13,
    ),
    "llava": Family(vlm("llava", text("llama"), TOWER | {"model_type": "clip_vision_model"}), f"{KV}*3", seed=3),
    "idefics3": Family(vlm("idefics3", text("llama"), TOWER), f"{KV}*3"),
    "pixtral": Family(vlm("pixtral", text("mistral"), TOWER), f"{KV}*3", seed=3),
    "mistral3": Family(
        vlm("mistral3", text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), TOWER | {"model_type": "pixtral"}),
        WINDOWED,
    ),
    "gemma3": Family(
        vlm(
            "gemma3",
            text("gemma3_text", GEMMA, rope_theta=1e6),
            TOWER | {"model_type": "siglip_vision_model", "image_size": 128},
        ),
        WINDOWED,
    ),
    "gemma4": Family(
        vlm("gemma4", text("gemma4_text", GEMMA4), TOWER | {"model_type": "gemma4_vision"}), WINDOWED, seed=13
    ),
    "aya_vision": Family(
        vlm("aya_vision", text("cohere2", sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=4.0), SIGLIP),
        WINDOWED,
    ),
    "cohere_compass": Family(
        vlm(
            "cohere_compass",
            text("cohere_compass_text", WINDOWS, logit_scale=4.0),
            TOWER | {"model_type": "cohere_compass_vision"},
        ),
        WINDOWED,
        seed=4,
    ),
    "deepseek_vl_v2": Family(
        vlm(
            "deepseek_vl_v2",
            text("deepseek_v2", EXPERTS, LATENT, norm_topk_prob=False),
            DEEPSEEK_TOWER,
            projector_config=DEEPSEEK_PROJECTOR,
        ),
        f"{KV}*3",
        seed=1,
    ),
    "deepseekocr": Family(
        vlm(
            "deepseekocr",
            text("deepseek_v2", EXPERTS, qk_nope_head_dim=0, norm_topk_prob=False),
            DEEPSEEK_TOWER,
            projector_config=DEEPSEEK_PROJECTOR,
        ),
        f"{KV}*3",
        seed=1,
    ),
    "deepseekocr_2": Family(
        vlm(
            "deepseekocr_2",
            text("deepseek_v2", EXPERTS, qk_nope_head_dim=0, norm_topk_prob=False),
            TOWER | {"model_type": "vision"},
            projector_config=DEEPSEEK_PROJECTOR,
        ),
        f"{KV}*3",
        seed=1,
    ),
    "dots_ocr": Family(vlm("dots_ocr", text("dots_ocr"), TOWER), f"{KV}*3"),
    "glm4v": Family(vlm("glm4v", text("glm4v_text", HALF_ROPE), GLM_TOWER, eos_token_id=[1]), f"{KV}*3"),
    "glm4v_moe": Family(
        vlm("glm4v_moe", text("glm4v_moe_text", EXPERTS, HALF_ROPE, use_qk_norm=True), GLM_TOWER), f"{KV}*3", seed=3
    ),
    "glm_ocr": Family(
        vlm(
            "glm_ocr",
            {name: size for name, size in SIZES.items() if name not in NOT_IN_GLM_OCR}
            | {
                "model_type": "glm_ocr_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 10000,
                },
            },
            {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        ),
        f"{KV}*3",
        seed=2,
    ),
    "granite4_vision": Family(
        vlm(
            "granite4_vision",
            text("granitemoehybrid", GRANITE, shared_intermediate_size=128, layer_types=["attention"] * 3),
            SIGLIP | {"hidden_size": 64},
        ),
        f"{KV}*3",
    ),
    "granite_vision": Family(vlm("granite_vision", text("granite", GRANITE), SIGLIP), f"{KV}*3", seed=4),
    "hunyuan_vl": Family(
        vlm(
            "hunyuan_vl",
            text(
                "hunyuan_vl",
                rope_scaling={
                    "type": "xdrope",
                    "alpha": 1000.0,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "xdrope_section": [2, 2, 2, 2],
                },
            ),
            TOWER,
        ),
        f"{KV}*3",
        seed=3,
    ),
    "idefics2": Family(
        vlm(
            "idefics2",
            text("mistral"),
            TOWER,
            perceiver_config={
                "model_type": "idefics2Perceiver",
                "num_key_value_heads": 2,
                "resampler_depth": 1,
                "resampler_head_dim": 16,
                "resampler_n_heads": 2,
                "resampler_n_latents": 4,
            },
        ),
        f"{KV}*3",
    ),
    "internvl": Family(
        vlm("internvl", text("qwen2"), TOWER | {"image_size": [32, 32], "patch_size": [8, 8]}), f"{KV}*3", seed=1
    ),
    "internvl_chat": Family(vlm("internvl_chat", text("qwen2"), SIGLIP), f"{KV}*3", seed=1),
    "jina_vlm": Family(vlm("jina_vlm", text("jina_vlm", additional_vocab_size=8), TOWER), f"{KV}*3", seed=1),
    "kimi_k25": Family(
        vlm("kimi_k25", text("kimi_k25", EXPERTS, LATENT), TOWER | {"model_type": "moonvit"}), f"{KV}*3"
    ),
    "kimi_k3": Family(
        vlm(
            "kimi_k3",
            text(
                "kimi_linear",
                EXPERTS,
                LATENT,
                num_experts_per_token=2,
                num_shared_experts=1,
                mla_use_nope=True,
                hidden_act="situ",
                linear_attn_config=KIMI_LINEAR,
            ),
            {
                "model_type": "moonvit3d",
                "vt_hidden_size": 32,
                "vt_intermediate_size": 64,
                "vt_num_attention_heads": 2,
                "vt_num_hidden_layers": 1,
                "qkv_hidden_size": 32,
                "mm_hidden_size": 32,
                "text_hidden_size": 64,
            },
        ),
        RECURRENT,
    ),
    "kimi_vl": Family(
        vlm("kimi_vl", text("deepseek_v3", EXPERTS, LATENT), TOWER | {"model_type": "moonvit"}), f"{KV}*3", seed=5
    ),
    "lfm2_vl": Family(
        vlm(
            "lfm2_vl",
            text(
                "lfm2",
                conv_bias=False,
                conv_L_cache=3,
                block_dim=64,
                block_ff_dim=128,
                block_multiple_of=32,
                block_auto_adjust_ff_dim=False,
                full_attn_idxs=[1],
            ),
            TOWER,
        ),
        f"{ARRAYS} {KV} {ARRAYS}",
        seed=10,
    ),
    "llava_next": Family(
        vlm("llava_next", text("mistral"), TOWER | {"model_type": "clip_vision_model"}), f"{KV}*3", seed=3
    ),
    "llava_onevision": Family(vlm("llava_onevision", text("qwen2"), SIGLIP), f"{KV}*3", seed=1),
    "llmjpvl": Family(vlm("llmjpvl", text("llama"), SIGLIP), f"{KV}*3", seed=3),
    "mage_vl": Family(vlm("mage_vl", text("qwen3"), TOWER | {"head_dim": 32, "hidden_size": 64}), f"{KV}*3", seed=1),
    "minicpmv4_6": Family(
        vlm(
            "minicpmv4_6", text("qwen3_5_text", GATED_DELTA, DEFAULT_BASE), TOWER | {"model_type": "minicpmv4_6_vision"}
        ),
        RECURRENT,
    ),
    "mistral_large3": Family(
        vlm("mistral_large3", text("mistral_large3", EXPERTS, LATENT), TOWER | {"model_type": "pixtral"}), f"{KV}*3"
    ),
    "molmo": Family(
        vlm(
            "molmo",
            text(
                "molmo", d_model=64, n_heads=4, n_kv_heads=2, n_layers=3, mlp_hidden_size=128, embedding_size=VOCAB_SIZE
            ),
            TOWER,
        ),
        f"{KV}*3",
        seed=1,
    ),
    "molmo2": Family(vlm("molmo2", text("molmo2", additional_vocab_size=8), TOWER), f"{KV}*3", seed=3),
    "moondream2": Family(vlm("moondream2", text("phi", num_key_value_heads=4), TOWER), f"{KV}*3", seed=1),
    "muse_glimmer": Family(
        vlm(
            "muse_glimmer",
            text(
                "muse_glimmer_text",
                WINDOWS,
                output_multiplier=1.0,
                rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            ),
            TOWER,
        ),
        WINDOWED,
    ),
    "nemotron_h_nano_omni": Family(
        vlm("nemotron_h_nano_omni", text("nemotron_h", EXPERTS, NEMOTRON_H), TOWER), f"{ARRAYS} {KV} {ARRAYS}", seed=2
    ),
    "phi4mm": Family(
        text(
            "phi4mm",
            partial_rotary_factor=0.5,
            vision_config=dict(TOWER),
            vision_lora={"layer": "", "r": 4, "lora_alpha": 8, "dp": 0.0},
            speech_lora={"r": 4, "lora_alpha": 8},
        ),
        f"{KV}*3",
        seed=1,
    ),
    "plamo2vl": Family(vlm("plamo2vl", text("plamo2", PLAMO2), SIGLIP), f"{ARRAYS} {KV} {ARRAYS}"),
    "smolvlm": Family(vlm("smolvlm", text("llama"), TOWER | {"model_type": "smolvlm_vision"}), f"{KV}*3"),
    "step3p7": Family(vlm("step3p7", text("step3p5", WINDOWS, STEP, moe_layers_enum=[1, 2]), TOWER), WINDOWED, seed=3),
    "youtu_vl": Family(text("youtu_vl", LATENT, vision_config=dict(TOWER)), f"{KV}*3", seed=3),
    "gemma4_unified": Family(
        vlm(
            "gemma4_unified",
            text(
                "gemma4_unified_text",
                GEMMA4,
                num_kv_shared_layers=0,
                hidden_size_per_layer_input=0,
                num_hidden_layers=3,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            ),
            TOWER,
        ),
        f"{KV} {ROTATING} {KV}",
        seed=19,
    ),
    "got": Family(text("got"), f"{KV}*3", seed=1),
    "locateanything": Family(
        vlm("locateanything", text("qwen2", tie_word_embeddings=True), TOWER | {"model_type": "moonvit"}),
        f"{KV}*3",
        seed=6,
    ),
    "minicpmv4_7": Family(
        vlm(
            "minicpmv4_7",
            text("qwen3_5_text", GATED_DELTA, DEFAULT_BASE),
            TOWER | {"model_type": "minicpmv4_7_vision"},
            **{name: i for i, name in enumerate(MINICPM_TOKENS, 1)},
        ),
        RECURRENT,
    ),
    "moondream3": Family(
        vlm("moondream3", text("moondream3", EXPERTS, num_key_value_heads=4, hidden_size=128, head_dim=32), TOWER),
        f"{KV}*3",
        seed=1,
    ),
    "paddleocr_vl": Family(
        text("paddleocr_vl", PADDLE_ROPE, use_bias=False, vision_config=dict(TOWER)), f"{KV}*3", seed=3
    ),
    "ernie4_5_moe_vl": Family(
        text(
            "ernie4_5_moe_vl",
            moe_num_experts=[4, 4],
            moe_intermediate_size=[32, 16],
            moe_layer_start_index=[1, 1],
            moe_layer_end_index=[2, 2],
            moe_num_shared_experts=1,
            mrope_section=[3, 3, 2],
            pixel_hidden_size=32,
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8},
        ),
        f"{KV}*3",
        seed=5,
    ),
    "minicpmo": Family(
        vlm("minicpmo", text("minicpmo", MROPE), SIGLIP, query_num=4, init_audio=False, init_tts=False, image_size=32),
        f"{KV}*3",
        seed=1,
    ),
    "phi4_siglip": Family(
        vlm(
            "phi4_siglip",
            {name: SIZES[name] for name in IN_PHI4_SIGLIP},
            {name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")}
            | {"model_type": "siglip2_vision_model", "num_attention_heads": 2, "image_size": 32, "num_patches": 16},
            mm_hidden_size=32,
        ),
        f"{KV}*3",
        seed=5,
    ),
    "zaya1_vl": Family(
        text(
            "zaya1_vl",
            num_experts=4,
            num_query_groups=2,
            ffn_hidden_size=64,
            zaya_mlp_expansion=32,
            vision_lora_rank_attn=4,
            vision_lora_rank_mlp=4,
            vision_config=QWEN_VISION,
        ),
        "CacheList*3",
        seed=5,
    ),
}
