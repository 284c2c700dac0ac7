"""sources_digest: identifies the code of Orchard that this process runs."""

from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("deployments", "engine")


def sources_digest(root: Path = ROOT) -> str:
    """Return a hex digest over the paths and contents of the Python files of deployments/ and engine/."""
    digest = sha256()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
