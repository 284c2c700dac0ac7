"""The files that sentence-transformers adds to a checkpoint: its modules, its prompts, its longest input."""

import json
from pathlib import Path
from typing import Any

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_optional_json

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
CROSS_ENCODER = "CrossEncoder"
"""`model_type` in SETTINGS_FILE of a model that reads two texts at once."""
LOGIT_SCORE = "LogitScore"
"""Module of a cross-encoder whose score comes from the logits of the next token."""


def has_modules(model_dir: Path) -> bool:
    """Return whether a checkpoint is one of sentence-transformers."""
    return (model_dir / MODULES_FILE).exists()


def read_modules(model_dir: Path) -> list[dict[str, str]]:
    """Return `type` and `path` of each module, [] without MODULES_FILE. Raises EngineFailed for a broken file."""
    path = model_dir / MODULES_FILE
    if not path.exists():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [{"type": str(module["type"]), "path": str(module.get("path", ""))} for module in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineFailed(f"{path}: expected a list of modules with `type` and `path` ({error!r})") from None


def kind_of(module: dict[str, str]) -> str:
    """Return the class name of a module, which has been in several packages."""
    return module["type"].rpartition(".")[2]


def is_cross_encoder(model_dir: Path) -> bool:
    """Return whether a checkpoint of sentence-transformers scores pairs of texts instead of embedding one."""
    if not has_modules(model_dir):
        return False
    kinds = map(kind_of, read_modules(model_dir))
    return LOGIT_SCORE in kinds or read_optional_json(model_dir / SETTINGS_FILE).get("model_type") == CROSS_ENCODER


def read_prompts(model_dir: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one. Raises EngineFailed for a broken file."""
    settings = read_optional_json(model_dir / SETTINGS_FILE)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    is_valid = isinstance(prompts, dict) and all(isinstance(prompt, str) for prompt in prompts.values())
    if not is_valid or (default is not None and default not in prompts):
        raise EngineFailed(
            f"{model_dir / SETTINGS_FILE}: prompts must be an object of texts that contains default_prompt_name "
            f"({default!r})"
        )
    return prompts, default


def read_max_tokens(model_dir: Path) -> int | None:
    """Return the most tokens of an input; None: the context of the model."""
    max_tokens = read_optional_json(model_dir / TRANSFORMER_FILE).get("max_seq_length")
    return max_tokens if isinstance(max_tokens, int) else None


def lowercases(model_dir: Path) -> bool:
    """Return whether inputs are lowercased before they are tokenized."""
    return read_optional_json(model_dir / TRANSFORMER_FILE).get("do_lower_case") is True


def read_template_options(model_dir: Path) -> dict[str, Any]:
    """Return the arguments with which the checkpoint's chat template is rendered. Raises EngineFailed."""
    processing = read_optional_json(model_dir / TRANSFORMER_FILE).get("processing_kwargs") or {}
    options = processing.get("chat_template") or {} if isinstance(processing, dict) else None
    if not isinstance(options, dict):
        raise EngineFailed(f"{model_dir / TRANSFORMER_FILE}: processing_kwargs.chat_template must be an object")
    return options
