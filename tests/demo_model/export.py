"""Trained weights to a checkpoint as the engine loads it, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten

from engine.demo import DEMO_MODEL
from tests.demo_model.batches import POSITION_SIDE
from tests.demo_model.encoding import IMAGE_TOKEN_ID, PAD_TOKEN_ID, PATCH_GRID, VIDEO_TOKEN_ID
from tests.demo_model.layers import NORM_EPS
from tests.demo_model.model import ROPE_THETA, VOCAB_SIZE, ModelConfig, TrainableModel
from tests.demo_model.vision import FRAMES, VisionConfig

END_OF_TURN_ID, VISION_START_ID, VISION_END_ID = 2, 3, 4
MAX_CONTEXT_TOKENS = 32768

Json = dict[str, Any]


def export_checkpoint(model: TrainableModel, folder: Path, dtype: mx.Dtype = mx.bfloat16) -> None:
    """Write weights and config, with the demo model's tokenizer, template and processor files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = checkpoint_weights(model, dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    config = checkpoint_config(model.config, str(dtype).removeprefix("mlx.core."))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    side_files = DEMO_MODEL if model.config.vision is not None else DEMO_MODEL / "draft"
    for file in side_files.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)


def load_checkpoint(config: ModelConfig, folder: Path) -> TrainableModel:
    """Return a checkpoint of this config as a trainable model, in float32."""
    model = TrainableModel(config)
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    names = {checkpoint_name(name, config): name for name, _ in parameters(model)}
    model.load_weights([(names[name], weight.astype(mx.float32)) for name, weight in loaded.items()])
    return model


def checkpoint_weights(model: TrainableModel, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Return the weights under their names in checkpoints; decays stay float32."""
    weights = {}
    for name, weight in parameters(model):
        if name.endswith("patch_embed.proj.weight"):  # both frames count the same
            weight = mx.broadcast_to(weight.mean(axis=2, keepdims=True), weight.shape)
        elif dtype == mx.bfloat16 and _is_shifted_norm(name, model.config):
            weight = (1 + weight).astype(dtype).astype(mx.float32) - 1  # so that 1 + weight is exact for all loaders
        kept = mx.float32 if name.endswith("A_log") else dtype
        weights[checkpoint_name(name, model.config)] = mx.contiguous(weight.astype(kept))
    return weights


def parameters(model: TrainableModel) -> list[tuple[str, mx.array]]:
    """Return all parameters with their names in the trainable model."""
    flat: Any = tree_flatten(model.parameters())
    return flat


def checkpoint_name(name: str, config: ModelConfig) -> str:
    """Return the name that a parameter of the trainable model has in checkpoints."""
    if config.vision is None:
        return "model." + name.removeprefix("language_model.")
    return name if name.startswith("mtp.") else "model." + name


def _is_shifted_norm(name: str, config: ModelConfig) -> bool:
    is_text_norm = "norm" in name and "visual" not in name and "linear_attn.norm" not in name
    return config.layers.is_gated and is_text_norm


def checkpoint_config(config: ModelConfig, dtype: str = "bfloat16") -> Json:
    """Return the content of config.json."""
    text = _text_config(config)
    if config.vision is None:
        return (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": dtype} | text | _qwen3_only(config)
        )
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VIDEO_TOKEN_ID,
        "vision_start_token_id": VISION_START_ID,
        "vision_end_token_id": VISION_END_ID,
        "eos_token_id": [END_OF_TURN_ID, PAD_TOKEN_ID],
        "dtype": dtype,
        "tie_word_embeddings": True,
        "text_config": {"dtype": dtype} | text | _qwen3_5_only(config),
        "vision_config": _vision_config(config.vision, config.layers.hidden_size),
    }


def _text_config(config: ModelConfig) -> Json:
    layers = config.layers
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "hidden_size": layers.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": layers.intermediate_size,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "num_attention_heads": layers.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": layers.num_kv_heads,
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def _qwen3_5_only(config: ModelConfig) -> Json:
    layers = config.layers
    is_full = [(index + 1) % config.attention_interval == 0 for index in range(config.num_layers)]
    return {
        "model_type": "qwen3_5_text",
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": None,
        "full_attention_interval": config.attention_interval,
        "layer_types": ["full_attention" if full else "linear_attention" for full in is_full],
        "linear_conv_kernel_dim": layers.conv_width,
        "linear_key_head_dim": layers.linear_head_dim,
        "linear_num_key_heads": layers.linear_heads,
        "linear_num_value_heads": layers.linear_heads,
        "linear_value_head_dim": layers.linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "partial_rotary_factor": config.rotary_share,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(config.rope_sections or ()),
            "partial_rotary_factor": config.rotary_share,
            "rope_theta": ROPE_THETA,
            "rope_type": "default",
        },
    }


def _qwen3_only(config: ModelConfig) -> Json:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "eos_token_id": [END_OF_TURN_ID, PAD_TOKEN_ID],
        "max_window_layers": config.num_layers,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _vision_config(vision: VisionConfig, output_size: int) -> Json:
    return {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "depth": vision.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": vision.hidden_size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_heads,
        "num_position_embeddings": POSITION_SIDE**2,
        "out_hidden_size": output_size,
        "patch_size": PATCH_GRID.patch_size,
        "spatial_merge_size": PATCH_GRID.merge_size,
        "temporal_patch_size": FRAMES,
    }
