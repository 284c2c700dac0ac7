"""Converts the GGUF file of a small Llama model to an MLX checkpoint.

    python -m engine.worker.gguf_checkpoint FILE DIRECTORY [--float32]

It serves the one model of engine/smollm2.py: weights of a Llama with Q4_1 or Q8_0 groups, and a byte-level BPE that
splits digits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
SAMPLING = {"do_sample": False}
"""For requests that ask for nothing else: sampled, so small a model loses the thread."""
CONTROL = 3
"""Type of control tokens in a GGUF."""


def convert(gguf: Path, checkpoint: Path, is_expanded: bool = False) -> None:
    """Write the checkpoint.

    Args:
        gguf: The file.
        checkpoint: Directory to write; created if missing.
        is_expanded: Write float32 instead of the weights of the file, most of which have 4 bits.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, meta = loaded
    info = {name: one.item() if isinstance(one, mx.array) and one.size == 1 else one for name, one in meta.items()}
    weights = _named_weights(arrays, info)
    bits = _bits_of(weights)
    if is_expanded:
        weights = _expanded(weights, bits)
    mx.save_safetensors(str(checkpoint / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_config(checkpoint, info, None if is_expanded else bits, is_tied="lm_head.weight" not in weights)
    _write_tokenizer(checkpoint, info)


def _named_weights(arrays: dict[str, mx.array], info: dict[str, Any]) -> dict[str, mx.array]:
    """Return the arrays of a GGUF under MLX's names, with the rows in MLX's order."""
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
    return weights


def _bits_of(weights: dict[str, mx.array]) -> dict[str, int]:
    """Return the bits per value of each quantized module, by its name."""
    return {  # a word has 32 bits, a group 32 values
        name.removesuffix(".scales"): weights[name.replace(".scales", ".weight")].shape[-1] // array.shape[-1]
        for name, array in weights.items()
        if name.endswith(".scales")
    }


def _expanded(weights: dict[str, mx.array], bits: dict[str, int]) -> dict[str, mx.array]:
    """Return the weights as float32."""
    expanded = dict(weights)
    for stem, number in bits.items():
        weight, scales, biases = (expanded.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
        expanded[f"{stem}.weight"] = mx.dequantize(weight, scales, biases, GROUP_SIZE, number)
    return {name: array.astype(mx.float32) for name, array in expanded.items()}


def _write_config(checkpoint: Path, info: dict[str, Any], bits: dict[str, int] | None, is_tied: bool) -> None:
    """Write config.json and generation_config.json; `bits` is None for expanded weights."""
    eos, bos = info["tokenizer.ggml.eos_token_id"], info["tokenizer.ggml.bos_token_id"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": info["llama.embedding_length"],
        "num_hidden_layers": info["llama.block_count"],
        "intermediate_size": info["llama.feed_forward_length"],
        "num_attention_heads": info["llama.attention.head_count"],
        "num_key_value_heads": info["llama.attention.head_count_kv"],
        "rms_norm_eps": info["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": info["llama.vocab_size"],
        "rope_theta": info["llama.rope.freq_base"],
        "max_position_embeddings": info["llama.context_length"],
        "tie_word_embeddings": is_tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    if bits is not None:
        others = {stem: {"group_size": GROUP_SIZE, "bits": number} for stem, number in bits.items() if number != 4}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **others}
    (checkpoint / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": bos, "eos_token_id": eos, **SAMPLING}
    (checkpoint / "generation_config.json").write_text(json.dumps(generation, indent=1))


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


def main() -> None:
    """Run the conversion."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--float32", action="store_true", help="expand the weights")
    given = parser.parse_args()
    convert(given.gguf, given.directory, given.float32)


if __name__ == "__main__":
    main()
