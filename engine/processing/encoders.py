"""Encoders: families whose tokens see each other in both directions, which give embeddings or scores, and no text."""

from pathlib import Path
from typing import Any

from engine.processing.checkpoint import read_optional_json

FAMILIES = ("bert", "modernbert", "xlm-roberta")
"""Values of `model_type` whose checkpoints are served as encoders."""

CLASSIFIER = "ForSequenceClassification"
"""How the names of architectures end whose output layer has classes instead of tokens."""

WITHOUT_HEAD = ("Model", "ForMaskedLM", "ForPreTraining")
"""How the names of architectures end whose output layer, if there is one, no embedding needs."""

DEFAULT_LABELS = 2
"""Classes of a checkpoint that names none, as transformers has it."""


def is_encoder(config: dict[str, Any]) -> bool:
    """Return whether a checkpoint is served as an encoder. config: its config.json."""
    return config.get("model_type") in FAMILIES


def is_encoder_checkpoint(model_dir: Path) -> bool:
    """Return whether the checkpoint in a directory is served as an encoder. Raises EngineFailed for a broken file."""
    return is_encoder(read_optional_json(model_dir / "config.json"))


def has_classes(config: dict[str, Any]) -> bool:
    """Return whether a checkpoint has an output layer for classes. config: its config.json."""
    return any(name.endswith(CLASSIFIER) for name in _architectures(config))


def num_unused_positions(config: dict[str, Any]) -> int:
    """Return how many of `max_position_embeddings` no token of a text has.

    The first token of XLM-RoBERTa has the position after `pad_token_id`.
    """
    pad_token_id = config.get("pad_token_id", 1)
    is_counted = config.get("model_type") == "xlm-roberta" and type(pad_token_id) is int
    return pad_token_id + 1 if is_counted else 0


def encoder_refusal(config: dict[str, Any]) -> str | None:
    """Return why a checkpoint of an encoder cannot be served, None if it can. config: its config.json."""
    if other := [name for name in _architectures(config) if not name.endswith((CLASSIFIER, *WITHOUT_HEAD))]:
        return f"{other[0]} gives neither embeddings nor scores; those with {', '.join((CLASSIFIER, *WITHOUT_HEAD))} do"
    if has_classes(config) and (number := _num_labels(config)) != 1:
        return f"its output layer has {number} classes (id2label), and a score needs exactly 1"
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            return f"config.json has {name} {config[name]!r}, which the library's module does not read"
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        return f"config.json has position_embedding_type {kind!r}; supported is absolute"
    is_modern = config.get("model_type") == "modernbert"
    for name in ("hidden_activation", "classifier_activation") if is_modern else ("hidden_act",):
        if (activation := config.get(name, "gelu")) != "gelu":
            return f"config.json has {name} {activation!r}; supported is gelu"
    if type(limit := config.get("max_position_embeddings")) is not int or limit <= num_unused_positions(config):
        return f"config.json has max_position_embeddings {limit!r}; it must be an integer with room for a token"
    return None


def _architectures(config: dict[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _num_labels(config: dict[str, Any]) -> int:
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if isinstance(number, int) else DEFAULT_LABELS
