"""ModelSource: the files of the models that a head serves, for machines that join without them."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from deployments.cluster.proof_server import Answer, BadQuestion, Question
from engine.processing.checkpoint import CONFIG_PATTERNS, WEIGHT_PATTERNS, checkpoint_here, is_local

FILES_PATH, PIECE_PATH = "/model-files", "/model-piece"
PIECE_BYTES = 16 * 2**20
"""Bytes of an answer: 3 s on the slowest link by which a machine may join, less than either end takes for silence."""


@dataclass(frozen=True)
class ModelFile:
    """A file of a model."""

    name: str
    """Path below the model's folder, with slashes."""
    num_bytes: int
    changed_ns: int
    """When it was last written, in nanoseconds since 1970; another time is another file."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model."""

    folder: str
    """Absolute path of their folder on the head; of a hub repository its last part is the commit."""
    is_repository: bool
    """Whether the model is a repository in the hub's cache, and not a folder."""
    files: tuple[ModelFile, ...]

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "ModelFiles":
        """Return the files of a JSON object. Raises TypeError, KeyError."""
        return cls(value["folder"], value["is_repository"], tuple(ModelFile(**one) for one in value["files"]))


class ModelSource:
    """Answers the questions of a machine that copies a model.

    Args:
        models: Returns name and revision of each model that the cluster serves; no other files are sent.
    """

    def __init__(self, models: Callable[[], Iterable[tuple[str, str | None]]]):
        self._models = models

    def answers(self) -> Mapping[str, Answer]:
        """Return path to answer."""
        return {FILES_PATH: self._list, PIECE_PATH: self._read}

    def _list(self, question: Question) -> bytes:
        """Answer a question for the files of `model`, of its `revision` if there is one."""
        model, folder = self._find(question)
        found = [
            ModelFile(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and _belongs(path.relative_to(folder))
        ]
        return json.dumps(asdict(ModelFiles(str(folder), not is_local(model), tuple(found)))).encode()

    def _read(self, question: Question) -> bytes:
        """Answer a question for PIECE_BYTES of `file` from byte `start` on, if it was last written `changed_ns`."""
        _, folder = self._find(question)
        try:
            name, start = question.fields["file"], int(question.fields["start"])
            changed_ns = int(question.fields["changed_ns"])
        except KeyError as missing:
            raise BadQuestion(f"the question has no {missing}") from None
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts or not _belongs(relative) or start < 0:
            raise BadQuestion(f"{name!r} from byte {start} is no piece of a model")
        try:
            with (folder / relative).open("rb") as file:
                if (folder / relative).stat().st_mtime_ns != changed_ns:
                    raise BadQuestion(f"{name} has changed on the head meanwhile")
                file.seek(start)
                return file.read(PIECE_BYTES)
        except OSError as error:
            raise BadQuestion(f"{name} cannot be read on the head: {error.strerror}") from None

    def _find(self, question: Question) -> tuple[str, Path]:
        """Return the name and the folder of the model that a question is about."""
        asked = question.fields.get("model", ""), question.fields.get("revision")
        folder = checkpoint_here(*asked) if asked in list(self._models()) else None
        if folder is None:
            named = " ".join(filter(None, asked))
            raise BadQuestion(f"the head serves no model {named!r}")
        return asked[0], folder


def _belongs(path: Path) -> bool:
    """Return whether a file below a model's folder is one that `orchard pull` would fetch."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and any(fnmatch(path.as_posix(), one) for one in (*CONFIG_PATTERNS, *WEIGHT_PATTERNS))
