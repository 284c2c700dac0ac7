"""ClusterFolder: the files in which a machine keeps its membership in a cluster, in ~/.orchard/cluster."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

TOKEN_BYTES = 32


class FolderError(Exception):
    """The files cannot be used; the message is for the operator."""


class ClusterFolder:
    """The files of this user and machine.

    Attributes:
        path: The folder, readable by its owner alone.
        token_file: The token that all machines of the cluster share.
        store_log: State of Ray's GCS, on the head.
        head_lock: Held by the process that is the head.
        ray_output: What `ray start` has printed.
    """

    def __init__(self, path: Path | None = None):
        self.path = Path.home() / ".orchard" / "cluster" if path is None else path
        self.token_file = self.path / "token"
        self.store_log = self.path / "gcs.log"
        self.head_lock = self.path / "head.lock"
        self.ray_output = self.path / "ray.log"
        self._started_file = self.path / "started.json"

    def make(self) -> None:
        """Make the folder. Raises FolderError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise FolderError(f"{self.path} cannot be made: {error.strerror}") from None

    def token(self) -> str:
        """Return the token; make one if there is none. Raises FolderError."""
        if not self.token_file.exists():
            self.write_token(secrets.token_hex(TOKEN_BYTES))
        try:
            mode = self.token_file.stat().st_mode & 0o777
            token = self.token_file.read_text().strip()
        except OSError as error:
            raise FolderError(f"{self.token_file} cannot be read: {error.strerror}") from None
        if mode & 0o077:
            raise FolderError(
                f"{self.token_file} has mode {mode:o}, so that other users can read it: run `chmod 600 "
                f"{self.token_file}`, or delete it for a new token, with which every machine must join again"
            )
        if not token:
            raise FolderError(f"{self.token_file} is empty: delete it for a new token")
        return token

    def write_token(self, token: str) -> None:
        """Write the token, readable by its owner alone. Raises FolderError."""
        self.write(self.token_file, token + "\n")

    def started(self) -> dict[str, Any]:
        """Return what `note_started` has noted; an empty dict if there is nothing to continue."""
        if not self.store_log.exists():
            return {}
        try:
            return json.loads(self._started_file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise FolderError(f"{self._started_file} cannot be read: {error}") from None

    def note_started(self, facts: dict[str, Any]) -> None:
        """Note what the application of this cluster was started with. Raises FolderError."""
        self.write(self._started_file, json.dumps(facts, indent=2, sort_keys=True) + "\n")

    def forget_cluster(self) -> None:
        """Remove the state of the cluster; the token stays."""
        for file in (self.store_log, self._started_file):
            file.unlink(missing_ok=True)

    def write(self, file: Path, text: str) -> None:
        """Write a file of the folder whole, readable by its owner alone. Raises FolderError."""
        new = file.with_name(f"{file.name}.new")
        try:
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
                written.write(text)
                written.flush()
                os.fsync(written.fileno())
            new.replace(file)
        except OSError as error:
            raise FolderError(f"{file} cannot be written: {error.strerror}") from None
