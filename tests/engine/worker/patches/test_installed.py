"""No patch is forgotten: each file of engine/worker/patches/ that can be installed is installed by the engine."""

import re
from pathlib import Path

import pytest

WORKER = Path(__file__).resolve().parents[4] / "engine" / "worker"
PATCHES = [path for path in sorted((WORKER / "patches").glob("*.py")) if "\ndef install(" in path.read_text()]


@pytest.mark.parametrize("path", [path for path in PATCHES if path.stem != "__init__"], ids=lambda path: path.stem)
def test_each_patch_is_installed(path: Path):
    others = [other.read_text() for other in WORKER.rglob("*.py") if other != path]
    assert any(re.search(rf"^ +{path.stem}\.install\(", text, re.MULTILINE) for text in others)
