"""copy_model: copies a model from the head to the place where this machine looks for it.

What is on its way lies in a hidden folder, which the same command continues. The files take their places when all of
them are whole, config.json last, so that no other program finds half a model. What is left of a copy of other weights
for the same place is deleted then.
"""

import glob
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub.constants

from deployments.cluster.facts import Checkpoint, read_checkpoint
from deployments.cluster.join_client import HeadClient
from deployments.cluster.model_files import PIECE_BYTES, ModelFile, ModelFiles
from engine.smollm2 import SMOLLM2, smollm2_directory

DIGITS = 12
"""Digits of a fingerprint in the name of the folder of what is on its way."""


class CannotCopy(Exception):
    """A model cannot be copied; the message says why, and what can be done instead."""


def missing_models(head: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return those of the head's models that are on the head and not on this machine, each once."""
    return [
        one
        for one in dict.fromkeys(head)
        if one.fingerprint and not read_checkpoint(one.model, one.revision).fingerprint
    ]


def copy_model(head: HeadClient, wanted: Checkpoint, on_bytes: Callable[[int], None]) -> Path:
    """Copy a model, or the rest of it; return its folder.

    Args:
        head: The head.
        wanted: The model as the head has it.
        on_bytes: Called with the bytes that have come, or were here already, since the last call.

    Raises:
        CannotCopy: There is no place for it, its files cannot be written, or they are not those of `wanted`.
        HeadRefused: The head does not answer, or a file has changed there.
    """
    found = head.model_files(wanted)
    place = _place(wanted, found)
    repository = place.parent.parent if found.is_repository else place.parent
    arriving = repository / f".{place.name}.{wanted.fingerprint[:DIGITS]}.incomplete"
    try:
        for file in found.files:
            _copy_file(head, wanted, file, arriving / _safe(file.name), on_bytes)
        (place / "config.json").unlink(missing_ok=True)  # that of an older model
        for file in sorted(found.files, key=lambda one: one.name == "config.json"):
            (place / file.name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(arriving / file.name, place / file.name)
        for folder in sorted((path for path in arriving.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        arriving.rmdir()
        for given_up in repository.glob(f".{glob.escape(place.name)}.{'?' * DIGITS}.incomplete"):
            shutil.rmtree(given_up, ignore_errors=True)
        name = wanted.revision or "main"
        if found.is_repository and name != place.name:
            (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / name).write_text(place.name)
    except OSError as error:
        raise CannotCopy(f"the files of {wanted.model} cannot be written to {place}: {error}") from None
    if read_checkpoint(wanted.model, wanted.revision).fingerprint != wanted.fingerprint:
        raise CannotCopy(
            f"{wanted.model} in {place} is not the model of the head: delete that folder, and copy it again"
        )
    return place


def _place(wanted: Checkpoint, found: ModelFiles) -> Path:
    """Return the folder in which this machine looks for the model. Raises CannotCopy."""
    if wanted.model == SMOLLM2:
        return smollm2_directory()
    if found.is_repository:
        repository = f"models--{wanted.model.replace('/', '--')}"
        return Path(huggingface_hub.constants.HF_HUB_CACHE) / repository / "snapshots" / _safe(Path(found.folder).name)
    place = Path(wanted.model).expanduser()
    if not place.is_absolute():
        raise CannotCopy(
            f"the head names its model by a path relative to its working directory, {wanted.model} ({found.folder} "
            "there): copy it by hand, or name it by an absolute path on the head"
        )
    return place


def _copy_file(
    head: HeadClient, model: Checkpoint, file: ModelFile, path: Path, on_bytes: Callable[[int], None]
) -> None:
    """Append what is missing of a file, piece by piece, each of them on the disk before the next one is asked for.

    A whole file has the time of the head's. The last piece of one that was interrupted is asked for again, as the
    machine may have stopped while it was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    if size == file.num_bytes and path.exists() and path.stat().st_mtime_ns == file.changed_ns:
        on_bytes(size)
        return
    start = 0 if size >= file.num_bytes else max(0, size // PIECE_BYTES - 1) * PIECE_BYTES
    on_bytes(start)
    with path.open("r+b" if path.exists() else "wb") as out:
        out.truncate(start)
        out.seek(start)
        while start < file.num_bytes:
            piece = head.model_piece(model, file, start)
            if not piece:
                raise CannotCopy(f"{file.name} of {model.model} ends at byte {start} of {file.num_bytes} on the head")
            out.write(piece)
            out.flush()
            os.fsync(out.fileno())
            start += len(piece)
            on_bytes(len(piece))
    os.utime(path, ns=(file.changed_ns, file.changed_ns))


def _safe(name: str) -> str:
    """Return a name from the head if it stays below its folder. Raises CannotCopy."""
    path = Path(name)
    if not name or path.is_absolute() or any(part == ".." or part.startswith(".") for part in path.parts):
        raise CannotCopy(f"the head names a file {name!r}, which is no file of a model")
    return name
