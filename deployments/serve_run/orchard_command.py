"""The command `orchard`, installed as a module of its own, which needs no `.pth` file.

An editable installation finds `deployments` by a `.pth` file, and Python ignores hidden ones: macOS hides a `.venv` in
folders that iCloud synchronizes, such as Documents and Desktop.
"""

import importlib.util
import os
import sys
from pathlib import Path

EDITABLE = "_editable_impl_orchard_mlx.pth"
"""Written by hatchling beside this module; each line is a directory of the checkout."""


def main() -> int:
    """Run the command; return its exit status."""
    if importlib.util.find_spec("deployments") is None:
        add_checkout(Path(__file__).parent / EDITABLE)
    from deployments.commands.program import main as run

    return run()


def add_checkout(editable: Path) -> None:
    """Do what the `.pth` file would have done, for this process and those that it starts, and say so."""
    directories = editable.read_text().split("\n")
    sys.path[:0] = filter(None, directories)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*directories, os.environ.get("PYTHONPATH")]))
    from deployments.serve_run.environment import hidden_files

    reason = hidden_files(editable.parent) or "`serve run` does not read them either, and runs without Orchard's checks"
    sys.stderr.write(f"Python ignores the .pth files of {editable.parent}: {reason}\n")
