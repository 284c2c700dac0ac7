"""How a checkpoint turns hidden states into embeddings, as its sentence-transformers files say."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EmbeddingConfig, Pooling
from engine.errors import EngineFailed
from engine.processing.checkpoint import read_optional_json
from engine.processing.sentence_transformers import (
    has_modules,
    is_cross_encoder,
    kind_of,
    read_max_tokens,
    read_modules,
    read_prompts,
)

POOLING_FILE = "1_Pooling/config.json"
COMPUTED_MODULES = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that are computed. Vectors are normalized also where there is no such module."""
PREFIX = "pooling_mode_"
SUPPORTED: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""Mode of sentence-transformers (a key without PREFIX, or the value of `pooling_mode`) to its pooling."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A checkpoint of sentence-transformers, which gives embeddings and generates no text."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Texts to put in front of an input, by name, such as query and document."""
    default_prompt: str | None = None
    """Name of the prompt of inputs that name none."""
    max_tokens: int | None = None
    """Most tokens of an input; None: the context of the model."""

    @classmethod
    def read(cls, model_dir: Path) -> "EmbeddingModel | None":
        """Read a checkpoint's files; return None for one that is not of sentence-transformers, or a cross-encoder.

        Raises:
            EngineFailed: A file cannot be read or has other contents than expected.
        """
        if not has_modules(model_dir) or is_cross_encoder(model_dir):
            return None
        return cls(*read_prompts(model_dir), read_max_tokens(model_dir))


def choose_pooling(config: EmbeddingConfig, model_dir: Path) -> Pooling:
    """Return the configured pooling, else the checkpoint's, else `last`.

    Raises:
        EngineFailed: The checkpoint has an unsupported pooling, or layers after it.
    """
    if config.pooling != "auto":
        return config.pooling
    named = [f"{module['path']} ({module['type']})" for module in read_modules(model_dir) if not _is_computed(module)]
    not_computed = named or sorted(path.name for path in model_dir.glob("*_Dense"))
    if not_computed:
        raise EngineFailed(
            f"the checkpoint has layers after its pooling ({not_computed[0]}), which are not run; set "
            "embedding.pooling to last or mean to get embeddings without them"
        )
    modes = _modes(read_optional_json(model_dir / POOLING_FILE))
    unsupported = [mode for mode in modes if mode not in SUPPORTED]
    if unsupported or len(modes) > 1:
        raise EngineFailed(
            f"the checkpoint's {POOLING_FILE} selects the pooling {' and '.join(modes)}; exactly one of "
            f"{' and '.join(SUPPORTED)} is supported: set embedding.pooling to last or mean"
        )
    return SUPPORTED[modes[0]] if modes else "last"


def pools_prompt(model_dir: Path) -> bool:
    """Return whether the tokens of a prompt in front of the input are pooled, too."""
    return read_optional_json(model_dir / POOLING_FILE).get("include_prompt") is not False


def _is_computed(module: dict[str, str]) -> bool:
    return kind_of(module) in COMPUTED_MODULES


def _modes(pooling: dict[str, Any]) -> list[str]:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return [mode]
    return [name.removeprefix(PREFIX) for name, is_on in pooling.items() if name.startswith(PREFIX) and is_on is True]
