"""How a checkpoint turns hidden states into embeddings, as its sentence-transformers files say."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EmbeddingConfig, Pooling
from engine.processing.checkpoint import read_optional_json
from engine.protocol import EngineFailed

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
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
        """Read a checkpoint's files; return None for one that is not of sentence-transformers.

        Raises:
            EngineFailed: A file cannot be read or has other contents than expected.
        """
        if not (model_dir / MODULES_FILE).exists():
            return None
        settings = read_optional_json(model_dir / PROMPTS_FILE)
        prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
        is_valid = isinstance(prompts, dict) and all(isinstance(prompt, str) for prompt in prompts.values())
        if not is_valid or (default is not None and default not in prompts):
            raise EngineFailed(
                f"{model_dir / PROMPTS_FILE}: prompts must be an object of texts that contains default_prompt_name "
                f"({default!r})"
            )
        max_tokens = read_optional_json(model_dir / LENGTH_FILE).get("max_seq_length")
        return cls(prompts, default, max_tokens if isinstance(max_tokens, int) else None)


def choose_pooling(config: EmbeddingConfig, model_dir: Path) -> Pooling:
    """Return the configured pooling, else the checkpoint's, else `last`.

    Raises:
        EngineFailed: The checkpoint has an unsupported pooling, or layers after it.
    """
    if config.pooling != "auto":
        return config.pooling
    named = [f"{module['path']} ({module['type']})" for module in _modules(model_dir) if not _is_computed(module)]
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
    return module["type"].rpartition(".")[2] in COMPUTED_MODULES


def _modules(model_dir: Path) -> list[dict[str, str]]:
    """Return the entries of modules.json, [] without one."""
    path = model_dir / MODULES_FILE
    if not path.exists():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [{"type": str(module["type"]), "path": str(module.get("path", ""))} for module in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineFailed(f"{path}: expected a list of modules with `type` and `path` ({error!r})") from None


def _modes(pooling: dict[str, Any]) -> list[str]:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return [mode]
    return [name.removeprefix(PREFIX) for name, is_on in pooling.items() if name.startswith(PREFIX) and is_on is True]
