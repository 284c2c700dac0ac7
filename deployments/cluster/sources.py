"""Identifies the code that this process runs: Orchard's own, and the libraries that machines have in common."""

import importlib.metadata
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("deployments", "engine")
PACKAGES = ("ray", "mlx", "mlx-lm", "mlx-vlm")


def sources_digest(root: Path = ROOT) -> str:
    """Return a hex digest over the paths and contents of the Python files of deployments/ and engine/."""
    digest = sha256()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def package_versions() -> dict[str, str]:
    """Return the installed version of each of PACKAGES."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def population_digest() -> str:
    """Return a hex digest over Orchard's sources and the versions of PACKAGES."""
    return sha256(f"{sources_digest()} {sorted(package_versions().items())}".encode()).hexdigest()[:32]
