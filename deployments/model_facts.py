"""read_model_facts: reads from a checkpoint what clients can learn about the model."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from deployments.http.model_facts import ModelFacts
from engine.errors import EngineFailed
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.weight_file import num_parameters

SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Size of ModelFacts to its key in config.json."""

TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_model_facts(
    model_dir: Path,
    config: dict[str, Any],
    tokenizer: ChatTokenizer,
    is_embedding_model: bool,
    is_reranker: bool = False,
) -> ModelFacts:
    """Return the facts of a checkpoint, whose weight files may be missing.

    Args:
        model_dir: The checkpoint.
        config: Its config.json.
        tokenizer: Its tokenizer.
        is_embedding_model: Whether it gives embeddings and generates no text.
        is_reranker: Whether it gives scores and generates no text.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    return ModelFacts(
        family=str(config.get("model_type") or ModelFacts.family),
        is_embedding_model=is_embedding_model,
        is_reranker=is_reranker,
        has_tools="tools" in tokenizer.template_variables,
        has_thinking=tokenizer.reasoning is not None,
        quantization=_quantization(config, text),
        num_bytes=sum(file.stat().st_size for file in model_dir.glob("*.safetensors") if file.exists()),
        num_parameters=_num_parameters(model_dir, config),
        digest=sha256(checkpoint_fingerprint(model_dir).encode()).hexdigest(),
        sizes={name: text[key] for name, key in SIZES.items() if isinstance(text.get(key), int)},
    )


def _num_parameters(model_dir: Path, config: dict[str, Any]) -> int:
    """Return the number of weights; 0 if a file cannot be read, which the engine names when it starts."""
    try:
        return num_parameters(model_dir, config)
    except EngineFailed:
        return 0


def _quantization(config: dict[str, Any], text: dict[str, Any]) -> str:
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    if isinstance(bits, int):
        return f"Q{bits}"
    kinds = (one.get(key) for one in (config, text) for key in ("dtype", "torch_dtype"))
    return next((TYPES[kind] for kind in kinds if isinstance(kind, str) and kind in TYPES), "")
