"""Refuses a checkpoint with weights that the library's loader drops without a word, though they change the answers.

mlx_vlm refuses tensors that its module lacks, but only after the family's `sanitize`, which removes some by name: the
output layer where config.json, or the default of the library's class, says that it is the embedding, and some biases.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from engine.errors import EngineFailed
from engine.worker.language_model import config_of

TEXT_PARTS = frozenset({"backbone", "gpt_neox", "language_model", "llm", "model", "text_model", "transformer"})
"""Parts before `layers` in the names of a language model's tensors; those of towers and heads have others."""

HEAD = "lm_head.weight"
EMBEDDING_WEIGHTS = ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight", "wte.weight")
COMPARED_BYTES = 2**24
"""Tensors are compared in pieces of this size, so that two of a gigabyte need no gigabytes of memory."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, which has not been read."""

    file: Path
    begin: int  # Bytes before it in the file.
    end: int
    dtype: str

    @property
    def data(self) -> np.ndarray:
        """Its bytes, uint8 [num_bytes], mapped from the file."""
        return np.memmap(self.file, np.uint8, "r", self.begin, (self.end - self.begin,))


def check_dropped(language_model: Any, path: Path) -> None:
    """Check that the files' output layer and biases are in the library's module, unless they change nothing.

    Args:
        language_model: The library's module; its weights need not be read.
        path: Directory of the checkpoint.

    Raises:
        EngineFailed: A tensor was dropped; names it.
    """
    flat: Any = tree_flatten(language_model.parameters())
    names, tensors = {name for name, _ in flat}, stored_tensors(path)
    head = next((name for name in tensors if _is_text(name, (HEAD,))), None)
    is_tied = getattr(config_of(language_model), "tie_word_embeddings", False)
    if is_tied and head is not None and not any(name.endswith(HEAD) for name in names):
        embedding = next((name for name in tensors if _is_text(name, EMBEDDING_WEIGHTS)), None)
        if embedding is None or not _are_equal(tensors[head], tensors[embedding]):
            raise EngineFailed(
                f"the checkpoint has an output layer {head} that differs from its embedding, but the library drops it "
                "and computes with the embedding (tie_word_embeddings in config.json, or the default of the "
                "library's class); the answers would be wrong. Set tie_word_embeddings to false"
            )
    for name in dropped_biases(tensors, names):
        if np.any(tensors[name].data):
            raise EngineFailed(
                f"the checkpoint has the bias {name}, but the library drops it, as its module has none there; the "
                "answers would be wrong"
            )


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a local checkpoint by name, by the files' headers."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = StoredTensor(file, begin, end, entry["dtype"])
    return found


def dropped_biases(tensors: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the biases of a checkpoint beside a weight of the library's module that has none.

    Tensors that the library renames or joins are not found under their names, and left to its own check.
    """
    weights = {_in_layers(name) for name in names}
    biases = [name for name in tensors if name.endswith(".bias") and _in_layers(name) not in weights]
    return [name for name in biases if f"{_in_layers(name).removesuffix('.bias')}.weight" in weights]


def _in_layers(name: str) -> str:
    """Return a name from the index of its layer on; the whole name of a tensor outside of a language model's layers."""
    before, found, rest = name.partition("layers.")
    return rest if found and set(filter(None, before.split("."))) <= TEXT_PARTS else name


def _is_text(name: str, ends: tuple[str, ...]) -> bool:
    return any(
        name.endswith(end) and set(filter(None, name.removesuffix(end).split("."))) <= TEXT_PARTS for end in ends
    )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.dtype != other.dtype or one.end - one.begin != other.end - other.begin:
        return False
    pieces = range(0, one.end - one.begin, COMPARED_BYTES)
    return all(
        np.array_equal(one.data[start : start + COMPARED_BYTES], other.data[start : start + COMPARED_BYTES])
        for start in pieces
    )
