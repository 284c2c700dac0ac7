"""Caches measured memory costs on disk, so that only a model's first start on a machine measures them.

A file is named by the digest of everything that the measurement depends on: the model's fingerprint, the device, the
versions of MLX, and this package's source. Missing, torn and incompatible files are measured again.
"""

import gc
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from engine.core.memory.costs import MemoryCosts

log = logging.getLogger("orchard.engine")

MAX_FILES = 1024
"""Files in the directory, of less than 1 KiB each; the oldest are removed first."""


def load_or_measure(directory: Path, key: str, measure: Callable[[], MemoryCosts]) -> MemoryCosts:
    """Return the costs stored under `key`, or measure and store them.

    Args:
        directory: Created if missing. If it cannot be written, costs are measured at each start.
        key: See `costs_key`.
        measure: Runs the probes; its `base_bytes` include the memory that is active when it is called.
    """
    gc.collect()  # what `measure` itself would free must not be subtracted from the base that it finds
    mx.synchronize()
    mx.clear_cache()
    active_bytes = mx.get_active_memory()
    path = directory / f"{key}.json"
    stored = _read(path)
    if stored is not None:
        return replace(stored, base_bytes=stored.base_bytes + active_bytes)
    costs = measure()
    _write(path, replace(costs, base_bytes=costs.base_bytes - active_bytes))
    return costs


def costs_key(fingerprint: str, *facts: object) -> str:
    """Return the hex digest of everything that measured costs depend on.

    Args:
        fingerprint: The model's, see ModelRunner.
        facts: Further influences on the intermediate results: draft tokens, compilation, BLAS.
    """
    device = json.dumps(mx.device_info(), sort_keys=True, default=str)
    machine = (platform.system(), platform.machine(), os.cpu_count(), str(mx.default_device()), device)
    versions = [version(name) for name in ("mlx", "mlx-vlm")]
    parts = (fingerprint, *machine, *versions, _source_digest(), *facts)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _source_digest() -> str:
    """Return the digest of all modules that compute: a change in any of them may change the costs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> MemoryCosts | None:
    try:
        values = json.loads(path.read_text())
        if values.keys() != {field.name for field in fields(MemoryCosts)}:
            raise ValueError("the file has other fields than MemoryCosts")
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
            raise ValueError("the values are not numbers")
        return MemoryCosts(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("memory costs in %s cannot be used and are measured again: %s", path, error)
        return None


def _write(path: Path, costs: MemoryCosts) -> None:
    """Write atomically: a torn file would cost a measurement."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(costs)))
        temporary.replace(path)
        for old in sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("memory costs could not be written to %s: %s", path, error)
