"""The fields of published checkpoints of popular models are accepted, with the sizes of tiny ones."""

import copy
from typing import Any

import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.processing.context import choose_context, library_config
from engine.processing.reference_config import text_section
from engine.worker.config_fields import check_fields
from engine.worker.patches import families
from engine.worker.windows import check_windows
from tests.support.families import FAMILIES
from tests.support.families.family import SLIDING_LAYERS
from tests.support.zoo import new_module

QWEN: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False, "rms_norm_eps": 1e-6}
QWEN_3_5: dict[str, Any] = {
    "hidden_act": "silu",
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
}
LLAMA_3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 2": ("llama", {"hidden_act": "silu", "rope_theta": None, "pretraining_tp": 1}, 4096),
    "Llama 3.1": (
        "llama",
        {"hidden_act": "silu", "rope_theta": 500000.0, "rope_scaling": LLAMA_3_ROPE, "max_position_embeddings": 131072},
        131072,
    ),
    "Mistral 7B v0.1": (
        "mistral",
        {"hidden_act": "silu", "sliding_window": 4096, "max_position_embeddings": 32768},
        4096,
    ),
    "Mistral 7B v0.3": (
        "mistral",
        {"hidden_act": "silu", "sliding_window": None, "rope_theta": 1e6, "max_position_embeddings": 32768},
        32768,
    ),
    "Mixtral 8x7B": ("mixtral", {"hidden_act": "silu", "sliding_window": None, "rope_theta": 1e6}, 4096),
    "Qwen2.5": (
        "qwen2",
        QWEN | {"sliding_window": 131072, "max_window_layers": 28, "rope_theta": 1e6, "max_position_embeddings": 32768},
        32768,
    ),
    "Qwen3": (
        "qwen3",
        QWEN | {"sliding_window": None, "max_window_layers": 36, "rope_theta": 1e6, "max_position_embeddings": 40960},
        40960,
    ),
    "Qwen3 30B A3B": (
        "qwen3_moe",
        QWEN | {"sliding_window": None, "max_window_layers": 48, "rope_theta": 1e6, "norm_topk_prob": True},
        4096,
    ),
    "Qwen1.5 MoE": (
        "qwen2_moe",
        QWEN | {"sliding_window": 32768, "max_window_layers": 21, "norm_topk_prob": False},
        4096,
    ),
    "Gemma": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, 4096),
    "Gemma 2": (
        "gemma2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "cache_implementation": "hybrid",
            "max_position_embeddings": 8192,
        },
        4096,
    ),
    "Gemma 3 1B": (
        "gemma3_text",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "cache_implementation": "hybrid",
            "max_position_embeddings": 32768,
        },
        32768,
    ),
    "Phi-2": ("phi", {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": False}, 4096),
    "Phi-3 mini 4k": ("phi3", {"hidden_act": "silu", "sliding_window": 2047, "rope_scaling": None}, 2047),
    "GLM-4 9B": ("glm", {"hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}, 4096),
    "GLM-4 0414": ("glm4", {"hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}, 4096),
    "GLM-4.5": (
        "glm4_moe",
        {"hidden_act": "silu", "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        4096,
    ),
    "gpt-oss": (
        "gpt_oss",
        {"hidden_act": "silu", "swiglu_limit": 7.0, "rope_theta": 150000, "layer_types": SLIDING_LAYERS},
        4096,
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        {
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        4096,
    ),
    "DeepSeek V4 Flash": (
        "deepseek_v4",
        {
            "hidden_act": "silu",
            "compress_ratios": [0, 0, 4, 128],
            "sliding_window": 128,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "swiglu_limit": 10.0,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "max_position_embeddings": 1048576,
        },
        1048576,
    ),
    "DeepSeek MoE 16B": ("deepseek", {"hidden_act": "silu", "norm_topk_prob": False, "scoring_func": "softmax"}, 4096),
    "RWKV-7": ("rwkv7", {"hidden_act": "sqrelu"}, 4096),
    "MiniMax M2": ("minimax", {"model_type": "minimax_m2", "hidden_act": "silu", "scoring_func": "sigmoid"}, 4096),
    "Granite 3": (
        "granite",
        {
            "hidden_act": "silu",
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
        },
        4096,
    ),
    "OLMo 2": ("olmo2", {"hidden_act": "silu", "rope_theta": 500000, "rms_norm_eps": 1e-6}, 4096),
    "Olmo 3": ("olmo3", {"hidden_act": "silu", "layer_types": SLIDING_LAYERS}, 4096),
    "SmolLM3": (
        "smollm3",
        {
            "hidden_act": "silu",
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1],
            "layer_types": ["full_attention"] * 3,
        },
        4096,
    ),
    "Command R": ("cohere", {"hidden_act": "silu", "logit_scale": 0.0625, "rope_theta": 8000000.0}, 4096),
    "Command R7B": (
        "cohere2",
        {
            "hidden_act": "silu",
            "logit_scale": 0.25,
            "layer_norm_eps": 1e-05,
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "position_embedding_type": "rope_gptj",
            "order_of_interleaved_layers": "local_attn_first",
        },
        4096,
    ),
    "Nemotron 4": ("nemotron", {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "norm_eps": 1e-5}, 4096),
    "LFM2": ("lfm2", {"norm_eps": 1e-5, "conv_bias": False}, 4096),
    "StarCoder2": (
        "starcoder2",
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096, "max_position_embeddings": 16384},
        4096,
    ),
    "StarCoder": ("gpt_bigcode", {"activation_function": "gelu", "scale_attn_weights": True}, 4096),
    "Pythia": ("gpt_neox", {"hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True}, 4096),
    "GPT-NeoX 20B": ("gpt_neox", {"hidden_act": "gelu_fast", "rotary_pct": 0.25}, 4096),
    "GPT-2": ("gpt2", {"activation_function": "gelu_new"}, 4096),
    "Qwen3.5": ("qwen3_5", QWEN_3_5, 4096),
    "Qwen3.5 35B A3B": ("qwen3_5_moe", QWEN_3_5 | {"router_aux_loss_coef": 0.001, "output_router_logits": False}, 4096),
    "Qwen3-Next": (
        "qwen3_next",
        QWEN | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "router_aux_loss_coef": 0.001},
        4096,
    ),
}
"""Family, fields and context limit."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_fields_of_a_published_checkpoint_are_accepted(model: str):
    family, fields, limit = PUBLISHED[model]
    config = copy.deepcopy(FAMILIES[family].config)
    text_section(config).update(fields)
    if fields.get("rope_theta", 1) is None:
        del config["rope_theta"]
    families.correct()
    made = new_module(as_read := library_config(EngineConfig(), config)).language_model
    check_fields(made, as_read)
    context = choose_context(EngineConfig(), config)
    check_windows(made, config, context)
    assert context == limit
