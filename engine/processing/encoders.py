"""Encoders: families whose tokens see each other in both directions, which give embeddings or scores, and no text."""

from pathlib import Path
from typing import Any

from engine.processing.checkpoint import read_optional_json
from engine.processing.nomic_bert import names_known_code, nomic_refusal, num_positions

NOMIC = "nomic_bert"
ROBERTAS = ("camembert", "roberta", "xlm-roberta")
"""Families with RoBERTa's arithmetic, each with a tokenizer of its own."""

FAMILIES = ("bert", "modernbert", NOMIC, *ROBERTAS)
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


def known_code(model_dir: Path) -> dict[str, Any]:
    """Return the keys that name code which the engine computes without running it, for `refuse_code`.

    The checkpoint of such an encoder is opened by the engine alone, and its tokenizer by its class.

    Raises:
        EngineFailed: config.json is broken.
    """
    config = read_optional_json(model_dir / "config.json")
    auto_map = config.get("auto_map")
    return {"auto_map": auto_map} if config.get("model_type") == NOMIC and names_known_code(auto_map) else {}


def has_classes(config: dict[str, Any]) -> bool:
    """Return whether a checkpoint has an output layer for classes. config: its config.json."""
    return any(name.endswith(CLASSIFIER) for name in _architectures(config))


def num_unused_positions(config: dict[str, Any]) -> int:
    """Return how many of `max_position_embeddings` no token of a text has.

    The first token of a RoBERTa has the position after `pad_token_id`.
    """
    pad_token_id = config.get("pad_token_id", 1)
    is_counted = config.get("model_type") in ROBERTAS and type(pad_token_id) is int
    return pad_token_id + 1 if is_counted else 0


def declared_positions(config: dict[str, Any]) -> Any:
    """Return `max_position_embeddings`, or what stands for it in the family's config.json; None if there is nothing."""
    if config.get("model_type") == NOMIC and nomic_refusal(config) is None:
        return num_positions(config)
    return config.get("max_position_embeddings")


def encoder_refusal(config: dict[str, Any]) -> str | None:
    """Return why a checkpoint of an encoder cannot be served, None if it can. config: its config.json."""
    if other := [name for name in _architectures(config) if not name.endswith((CLASSIFIER, *WITHOUT_HEAD))]:
        return f"{other[0]} gives neither embeddings nor scores; those with {', '.join((CLASSIFIER, *WITHOUT_HEAD))} do"
    if has_classes(config) and (number := _num_labels(config)) != 1:
        return f"its output layer has {number} classes (id2label), and a score needs exactly 1"
    if config.get("model_type") == NOMIC and (reason := nomic_refusal(config)) is not None:
        return reason
    return _arithmetic_refusal(config)


def _arithmetic_refusal(config: dict[str, Any]) -> str | None:
    """Return which field of config.json asks for an arithmetic that the family's module has not, None for none."""
    family = config.get("model_type")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            return f"config.json has {name} {config[name]!r}, which the library's module does not read"
    positions = "rope" if family == NOMIC else "absolute"
    if (kind := config.get("position_embedding_type", positions)) != positions:
        return f"config.json has position_embedding_type {kind!r}; supported is {positions}"
    known = "silu" if family == NOMIC else "gelu"
    for name in ("hidden_activation", "classifier_activation") if family == "modernbert" else ("hidden_act",):
        if (activation := config.get(name, known)) != known:
            return f"config.json has {name} {activation!r}; supported is {known}"
    pad_token_id = config.get("pad_token_id", 1)
    if family in ROBERTAS and (type(pad_token_id) is not int or pad_token_id < 0):
        return f"config.json has pad_token_id {pad_token_id!r}, from which positions are counted; it must be at least 0"
    if type(limit := declared_positions(config)) is not int or limit <= num_unused_positions(config):
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
