"""What the self-test runs on: versions, operating system, device and its limits. Nothing that names a person."""

import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.worker import device_facts

LIBRARIES = ("orchard-mlx", "mlx", "mlx-lm", "mlx-vlm", "transformers", "ray")
TIMEOUT_S = 5.0


def versions() -> dict[str, str]:
    """Return the versions of Orchard and of what it runs on."""
    commit = _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])
    installed = {name: _version(name) for name in LIBRARIES}
    installed["orchard-mlx"] += f", commit {commit}" if commit else ""
    return {**installed, "python": platform.python_version(), "system": platform.platform()}


def device() -> dict[str, str]:
    """Return the device's name and limits."""
    wired_mb = _output(["sysctl", "-n", "iogpu.wired_limit_mb"]) if platform.system() == "Darwin" else None
    wired = "not on this device" if wired_mb is None else f"{wired_mb} MiB (0 is the system's default)"
    return {**device_facts.device_facts(), "wired limit": wired}


def without_home(text: str) -> str:
    """Replace paths in the home directory, so that a report names no person."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return text
    return text if home == "/" else re.sub(re.escape(home) + r"(/[^\s:'\",)\]]*)?", "<home>", text)


def model_name(model: str) -> str:
    """Return a hub repository, or the name of a directory without those above it."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _output(command: Sequence[str]) -> str | None:
    """Return what a command prints; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
