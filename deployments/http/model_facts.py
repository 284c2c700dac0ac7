"""ModelFacts: what clients can learn about the served model."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the checkpoint for pages about the model."""

    family: str = "unknown"
    """`model_type` of its config.json."""
    is_embedding_model: bool = False
    """Whether it gives embeddings and generates no text."""
    has_tools: bool = False
    """Whether its chat template knows tools."""
    has_thinking: bool = False
    """Whether its chat template can let it think."""
    quantization: str = ""
    """`Q4` for weights of 4 bits, else the type of the weights, such as BF16; '' if the configuration does not tell."""
    num_bytes: int = 0
    """Bytes of the weight files on this node; 0 if it has none."""
    digest: str = 64 * "0"
    """64 hexadecimal digits that identify tokenizer and configuration."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the network: embedding_length, block_count, attention.head_count, attention.head_count_kv."""
    is_reranker: bool = False
    """Whether it gives scores and generates no text."""
    num_parameters: int = 0
    """Weights, counted as before a quantization; 0 if their files are not on this node, or cannot be read."""
