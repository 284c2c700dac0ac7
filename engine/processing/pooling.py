"""How a checkpoint turns hidden states into embeddings, as its sentence-transformers files say."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EmbeddingConfig, Pooling
from engine.errors import EngineFailed
from engine.processing.checkpoint import read_optional_json
from engine.processing.encoders import has_classes, is_encoder, is_encoder_checkpoint
from engine.processing.sentence_transformers import (
    has_modules,
    is_cross_encoder,
    kind_of,
    lowercases,
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
OF_ENCODERS: dict[str, Pooling] = {**SUPPORTED, "cls": "cls", "cls_token": "cls"}
"""The same for encoders, whose first token sees the whole text."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A checkpoint of sentence-transformers or an encoder, which gives embeddings and generates no text."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Texts to put in front of an input, by name, such as query and document."""
    default_prompt: str | None = None
    """Name of the prompt of inputs that name none."""
    max_tokens: int | None = None
    """Most tokens of an input; None: the context of the model."""
    lowercases: bool = False
    """Whether inputs are lowercased before they are tokenized."""

    @classmethod
    def read(cls, model_dir: Path) -> "EmbeddingModel | None":
        """Read a checkpoint's files; return None for a model of text without modules.json, or one that scores pairs.

        Raises:
            EngineFailed: A file cannot be read or has other contents than expected.
        """
        config = read_optional_json(model_dir / "config.json")
        scores_pairs = is_cross_encoder(model_dir) or (is_encoder(config) and has_classes(config))
        if scores_pairs or not (has_modules(model_dir) or is_encoder(config)):
            return None
        return cls(*read_prompts(model_dir), read_max_tokens(model_dir), lowercases(model_dir))


def choose_pooling(config: EmbeddingConfig, model_dir: Path) -> Pooling:
    """Return the configured pooling, else the checkpoint's, else `last`, which an encoder must have named.

    Raises:
        EngineFailed: The checkpoint has an unsupported pooling, or layers after it, or is an encoder without any.
    """
    supported = OF_ENCODERS if is_encoder_checkpoint(model_dir) else SUPPORTED
    wanted = " or ".join(sorted(set(supported.values())))
    if config.pooling != "auto":
        if config.pooling not in supported.values():
            raise EngineFailed(f"embedding.pooling is {config.pooling}, which needs an encoder; set it to {wanted}")
        return config.pooling
    named = [f"{module['path']} ({module['type']})" for module in read_modules(model_dir) if not _is_computed(module)]
    not_computed = named or sorted(path.name for path in model_dir.glob("*_Dense"))
    if not_computed:
        raise EngineFailed(
            f"the checkpoint has layers after its pooling ({not_computed[0]}), which are not run; set "
            f"embedding.pooling to {wanted} to get embeddings without them"
        )
    modes = _modes(read_optional_json(model_dir / POOLING_FILE))
    unsupported = [mode for mode in modes if mode not in supported]
    if unsupported or len(modes) > 1:
        raise EngineFailed(
            f"the checkpoint's {POOLING_FILE} selects the pooling {' and '.join(modes)}; exactly one of "
            f"{' and '.join(supported)} is supported: set embedding.pooling to {wanted}"
        )
    if not modes and supported is OF_ENCODERS:
        raise EngineFailed(
            f"the checkpoint is an encoder without {POOLING_FILE}, which would say how it was trained to pool: set "
            f"embedding.pooling to {wanted}"
        )
    return supported[modes[0]] if modes else "last"


def pools_prompt(model_dir: Path) -> bool:
    """Return whether the tokens of a prompt in front of the input are pooled, too."""
    return read_optional_json(model_dir / POOLING_FILE).get("include_prompt") is not False


def _is_computed(module: dict[str, str]) -> bool:
    return kind_of(module) in COMPUTED_MODULES


def _modes(pooling: dict[str, Any]) -> list[str]:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return [mode]
    return [name.removeprefix(PREFIX) for name, is_on in pooling.items() if name.startswith(PREFIX) and is_on is True]
