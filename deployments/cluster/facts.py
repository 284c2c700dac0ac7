"""Facts: what machines of one cluster must have in common, or must know of each other, as read on this machine."""

import platform
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from deployments.cluster.sources import ROOT, package_versions, sources_digest
from engine.errors import EngineFailed
from engine.processing.checkpoint import checkpoint_here
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.weight_file import fingerprint


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine."""

    model: str
    """As the configuration names it."""
    revision: str | None
    fingerprint: str
    """Hash of sampled blocks of the weights, the configuration and the tokenizer; '' if the model is not here."""
    num_bytes: int
    """Size of the weights; 0 if they are not here."""


@dataclass(frozen=True)
class Facts:
    """The properties of a machine that are compared. Sizes are in bytes."""

    python: str
    """Version with its patch number."""
    packages: Mapping[str, str]
    """Name to version."""
    sources: str
    """Digest of Orchard's own code."""
    lock_file: str
    """Digest of uv.lock; '' without one."""
    checkpoints: tuple[Checkpoint, ...]
    memory_bytes: int
    free_disk_bytes: int
    """On the disk of the home directory, where models are kept."""
    time_s: float
    """Seconds since 1970, when the facts were read."""
    root: str
    """Folder of the checkout."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "Facts":
        """Return the facts of a JSON object that `as_json` has made. Raises TypeError, KeyError."""
        checkpoints = tuple(Checkpoint(**checkpoint) for checkpoint in value["checkpoints"])
        return cls(**{**value, "checkpoints": checkpoints})

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def read_facts(models: Iterable[tuple[str, str | None]]) -> Facts:
    """Read the facts of this machine; of weights only samples, so that it takes less than a second.

    Args:
        models: Name and revision of each model that the cluster serves.
    """
    lock_file, home = ROOT / "uv.lock", Path.home()
    return Facts(
        python=platform.python_version(),
        packages=package_versions(),
        sources=sources_digest(),
        lock_file=sha256(lock_file.read_bytes()).hexdigest()[:32] if lock_file.exists() else "",
        checkpoints=tuple(read_checkpoint(model, revision) for model, revision in models),
        memory_bytes=psutil.virtual_memory().total,
        free_disk_bytes=shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free,
        time_s=time.time(),
        root=str(ROOT),
    )


def read_checkpoint(model: str, revision: str | None) -> Checkpoint:
    """Read what identifies a model; nothing is downloaded. Weights that cannot be read count as missing."""
    path = checkpoint_here(model, revision)
    weights = [] if path is None else sorted(path.glob("*.safetensors"))
    if path is None or not weights:
        return Checkpoint(model, revision, "", 0)
    try:
        digest = fingerprint([path], checkpoint_fingerprint(path))[:32]
    except EngineFailed:
        return Checkpoint(model, revision, "", 0)
    return Checkpoint(model, revision, digest, sum(file.stat().st_size for file in weights))
