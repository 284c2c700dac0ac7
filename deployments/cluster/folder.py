"""ClusterFolder: the files in which a machine keeps its membership in a cluster, in ~/.orchard/cluster."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN_BYTES = 32
HEAD_LOCK = "head.lock"
"""Held by the process that is the head."""


class FolderError(Exception):
    """The files cannot be used; the message is for the operator."""


@dataclass(frozen=True)
class TlsFiles:
    """The files with which a machine encrypts its connections; none of them exists in a cluster without TLS."""

    authority: Path
    """Certificate of the cluster's authority."""
    authority_key: Path
    """Private key of the authority; on the head, and on the machines that copy its log."""
    certificate: Path
    """Certificate of this machine."""
    key: Path
    """Private key of this machine."""
    ledger: Path
    """Certificates of all machines, see ledger.py."""


class ClusterFolder:
    """The files of this user and machine.

    Attributes:
        path: The folder, readable by its owner alone.
        token_file: The token that all machines of the cluster share.
        join_token: What a machine needs to join, see join_token.py; on the head, and on members of one without TLS.
        tls: Certificates and keys.
        store_log: State of Ray's GCS, on the head.
        log_copy: Copy of the head's log, on a member.
        shared: What the head has told its members, so that one of them can become the head.
        ray_output: What `ray start` has printed.
    """

    def __init__(self, path: Path | None = None):
        self.path = Path.home() / ".orchard" / "cluster" if path is None else path
        self.token_file = self.path / "token"
        self.join_token = self.path / "join_token"
        self.tls = TlsFiles(
            authority=self.path / "authority.pem",
            authority_key=self.path / "authority.key",
            certificate=self.path / "machine.pem",
            key=self.path / "machine.key",
            ledger=self.path / "machines.json",
        )
        self.store_log = self.path / "gcs.log"
        self.log_copy = self.path / "gcs.copy"
        self.shared = self.path / "shared.json"
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
        for file in (self.store_log, self._started_file, self.path / "members.json", self.path / "head.json"):
            file.unlink(missing_ok=True)

    def forget_secrets(self) -> None:
        """Remove the token, and all certificates and keys: nothing that machines know of the cluster opens it."""
        tls = self.tls
        for file in (self.token_file, self.join_token, tls.authority, tls.authority_key, tls.ledger):
            file.unlink(missing_ok=True)
        self.forget_certificate()

    def forget_certificate(self) -> None:
        """Remove this machine's certificate and key: its connections are no longer encrypted."""
        for file in (self.tls.certificate, self.tls.key):
            file.unlink(missing_ok=True)

    def forget_copy(self) -> None:
        """Remove what the head has given to its members."""
        for file in (self.log_copy, self.shared):
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
