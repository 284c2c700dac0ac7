"""Finds the models on this machine's disk: the hub's cache, Orchard's own cache, the demo and given directories."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.demo import DEMO_MODEL
from engine.smollm2 import SMOLLM2, smollm2_directory
from engine.user_cache import user_cache


@dataclass(frozen=True)
class ModelOnDisk:
    """A model, or a part of one, on the disk."""

    name: str
    """As `orchard serve` takes it."""
    path: Path
    num_bytes: int
    """Bytes of its weights; 0 if only its configuration is here."""
    family: str
    bits: int | None
    """Bits per weight, of a quantized model."""
    is_complete: bool
    """Whether all files that its index names are here."""


def hub_folder() -> Path:
    """Return the folder of the hub's client for models, which may not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def models_on_disk(directories: Iterable[Path]) -> list[ModelOnDisk]:
    """Return the models by name; of a hub repository the newest snapshot."""
    found = [_read("demo", DEMO_MODEL), _read(SMOLLM2, smollm2_directory())]
    for repository in sorted(hub_folder().glob("models--*")):
        snapshots = sorted(repository.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        if snapshots:
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            found.append(_read(name, snapshots[-1]))
    for directory in (user_cache(), *directories):
        found += [_read(str(path), path) for path in _below(directory) if path != smollm2_directory()]
    return [one for one in found if one is not None]


def _below(directory: Path) -> Iterator[Path]:
    """Yield the directory, or those up to two levels below it, that have a config.json."""
    for pattern in ("config.json", "*/config.json", "*/*/config.json"):
        for path in sorted(directory.expanduser().absolute().glob(pattern)):
            yield path.parent


def _read(name: str, path: Path) -> ModelOnDisk | None:
    """Read a model's configuration; None if there is no valid one."""
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    weights = list(path.glob("*.safetensors"))
    quantization = config.get("quantization") or {}
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    num_bytes = sum(file.stat().st_size for file in weights if file.exists())
    return ModelOnDisk(name, path, num_bytes, str(kind), bits, _is_complete(path, {file.name for file in weights}))


def _is_complete(path: Path, names: set[str]) -> bool:
    for index in path.glob("*.safetensors.index.json"):
        try:
            return set(json.loads(index.read_text())["weight_map"].values()) <= names
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
    return bool(names)
