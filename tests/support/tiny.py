"""Builds tiny random checkpoints of the Qwen3.5 family, as the hub has them: vision tower, MTP head, 512 tokens.

The tensors have the names, layouts and conventions of raw files (norms as gain - 1), so that all of mlx_vlm's and our
own loading runs. The same arguments give the same numbers, and no global random state is used.
"""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import qwen3_5_mtp
from mlx_vlm.utils import get_model_and_args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
)
TOKEN_IDS = {token: i for i, token in enumerate(SPECIAL_TOKENS)}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

SHIFTED_NORMS = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
RAW_NAMES = {
    "language_model.lm_head": "lm_head",
    "language_model.model": "model.language_model",
    "vision_tower": "model.visual",
}


@dataclass(frozen=True)
class Tiny:
    """The choices of a tiny model. interval: every how manieth layer has full attention, the others are gated delta
    nets.

    tie: the embedding is the output layer too. mtp: with a head. scale: of all matrices; larger ones make sharper
    distributions. agree: above 0 the layers of model and head add only so little to the embedding of the last token
    that the head often guesses the model's next one: 38 % of them with 0.3, 66 % with 0.1, and all when tied.
    """

    layers: int = 4
    interval: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    tie: bool = False
    mtp: bool = True
    seed: int = 0
    scale: float = 1.0
    agree: float = 0.0
    dtype: str = "float32"

    def __post_init__(self):
        assert 2 <= self.interval <= self.layers, (
            f"interval is {self.interval}, expected 2 to {self.layers}: mlx_vlm needs both"
        )


def build(out: Path, tiny: Tiny) -> Path:
    """Writes the checkpoint into `out`, which is made if needed, and returns it."""
    out.mkdir(parents=True, exist_ok=True)
    config = _config(tiny)
    write_side_files(out)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    weights = _Weights(tiny).all(config)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    return out


def write_side_files(out: Path) -> None:
    """Write tokenizer, chat template and settings of a checkpoint of VOCAB_SIZE tokens."""
    _tokenizer().save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name, content in _side_files().items():
        (out / name).write_text(json.dumps(content, indent=1))


class _Weights:
    """Numbers for every tensor, drawn in the order of the names."""

    def __init__(self, tiny: Tiny):
        self._tiny = tiny
        self._rng = np.random.default_rng(tiny.seed)

    def all(self, config: dict[str, Any]) -> dict[str, mx.array]:
        arch: Any = get_model_and_args(copy.deepcopy(config))[0]  # a deep copy each time: the configs edit theirs
        model = arch.Model(arch.ModelConfig.from_dict(copy.deepcopy(config)))
        weights = {}
        for name, shape in _shapes(model):
            raw = name
            for ours, theirs in RAW_NAMES.items():
                raw = theirs + name.removeprefix(ours) if name.startswith(ours + ".") else raw
            weights[raw] = self._array(name, _raw_layout(name, self._draw(name, shape)))
        if self._tiny.mtp:
            weights |= self._head(config["text_config"])
        return weights

    def _head(self, text_config: dict[str, Any]) -> dict[str, mx.array]:
        head_config = qwen3_5_mtp.ModelConfig.from_dict({"text_config": copy.deepcopy(text_config)})
        head = qwen3_5_mtp.Model(head_config)
        return {f"mtp.{name}": self._array(name, self._draw(name, shape)) for name, shape in _shapes(head)}

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) > 1:
            return self._matrix(name, shape)
        noise = 0.05 * self._rng.standard_normal(shape)
        if name.endswith("A_log"):
            return np.log(self._rng.uniform(1, 16, shape))
        if name.endswith("dt_bias"):
            return np.ones(shape)
        if name.endswith("bias"):
            return noise
        in_vision = name.startswith("vision_tower")
        is_shifted = not in_vision and not name.endswith("linear_attn.norm.weight")
        return noise if is_shifted else 1 + noise

    def _matrix(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = self._rng.standard_normal(shape)
        fan_in = int(np.prod(shape[1:]))
        agree = self._tiny.agree
        if agree and name == "fc.weight":
            side = shape[0]
            return np.concatenate([np.eye(side), 0.02 * noise[:, side:]], axis=1)  # the token's embedding as it is
        if agree and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            return noise * (agree / fan_in**0.5)
        return noise * (self._tiny.scale if "embed_tokens" in name else self._tiny.scale / fan_in**0.5)

    def _array(self, name: str, values: np.ndarray) -> mx.array:
        dtype = mx.float32 if name.endswith("A_log") else getattr(mx, self._tiny.dtype)
        return mx.array(values.astype(np.float32)).astype(dtype)


def _shapes(module: Any) -> list[tuple[str, tuple[int, ...]]]:
    flat: Any = tree_flatten(module.parameters())
    return sorted((name, w.shape) for name, w in flat)


def _raw_layout(name: str, values: np.ndarray) -> np.ndarray:
    """Convolutions have their channels where PyTorch has them."""
    if name.endswith("conv1d.weight"):
        return np.moveaxis(values, 1, 2)
    if name.endswith("patch_embed.proj.weight"):
        return values.transpose(0, 4, 1, 2, 3)
    return values


def _config(tiny: Tiny) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": tiny.hidden,
        "intermediate_size": 2 * tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "full_attention_interval": tiny.interval,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tiny.tie,
        "attention_bias": False,
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 8 / tiny.head_dim,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": _vision_config(tiny.hidden),
        "image_token_id": TOKEN_IDS["<|image_pad|>"],
        "video_token_id": TOKEN_IDS["<|video_pad|>"],
        "vision_start_token_id": TOKEN_IDS["<|vision_start|>"],
        "vision_end_token_id": TOKEN_IDS["<|vision_end|>"],
        "tie_word_embeddings": tiny.tie,
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
    }


def _vision_config(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": hidden,
        "num_heads": 2,
        "patch_size": 8,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }


def _side_files() -> dict[str, dict[str, Any]]:
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    return {
        "generation_config.json": {"eos_token_id": TOKEN_IDS["<|im_end|>"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "model_max_length": 32768,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "size": {"shortest_edge": 256, "longest_edge": 4096},
            **patches,
        },
    }


def _tokenizer() -> Tokenizer:
    """Byte-level BPE over made-up words: any text can be encoded, VOCAB_SIZE tokens in all."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(400)]
    corpus = [" ".join(rng.choices(words, k=12)) for _ in range(300)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
