"""Ledger: the certificates of a cluster's machines, and which of them are revoked.

The head writes it, and tells it to the members every few seconds. A certificate that is not in it opens nothing: a
machine that was the head's copy, and so has the authority's key, cannot issue itself another one after it was revoked.
"""

import json
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from deployments.cluster.folder import ClusterFolder, FolderError
from engine.process_lock import LockHeld, ProcessLock

Standing = Literal["admitted", "revoked", "unknown"]

MAX_MACHINES = 256
"""Limit of the certificates in a ledger; beyond it, the one revoked first is forgotten."""
LOCK_WAIT_S = 5.0


@dataclass(frozen=True)
class Machine:
    """A machine's certificate."""

    fingerprint: str
    """SHA-256 of the certificate."""
    address: str
    issued_s: float
    """Seconds since 1970."""
    revoked_s: float | None = None
    """Seconds since 1970; None: it is valid."""


def fingerprint_of(pem: str) -> str:
    """Return the SHA-256 of a certificate. Raises ValueError: it is no certificate."""
    return sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


class Ledger:
    """The ledger as this machine knows it. Its methods may be called in any thread.

    Args:
        file: The file, which is read again when it has changed; without one, no certificate is admitted.
    """

    def __init__(self, file: Path):
        self._file = file
        self._read: tuple[tuple[int, ...], dict[str, Machine]] = ((), {})

    def machines(self) -> list[Machine]:
        """Return the machines in the order in which their certificates were issued. Raises FolderError."""
        return list(self._machines().values())

    def standing(self, certificate: bytes) -> Standing:
        """Tell whether a certificate, as DER, is admitted. Raises FolderError."""
        machine = self._machines().get(sha256(certificate).hexdigest())
        if machine is None:
            return "unknown"
        return "admitted" if machine.revoked_s is None else "revoked"

    def _machines(self) -> dict[str, Machine]:
        try:
            found = self._file.stat()
            state = (found.st_ino, found.st_mtime_ns, found.st_size)
            if state != self._read[0]:
                known = [Machine(**one) for one in json.loads(self._file.read_text())]
                self._read = state, {machine.fingerprint: machine for machine in known}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise FolderError(f"{self._file} cannot be read: {error}") from None
        return self._read[1]


def write_machines(folder: ClusterFolder, machines: Iterable[Machine]) -> None:
    """Write a ledger. Raises FolderError."""
    folder.write(folder.tls.ledger, json.dumps([asdict(machine) for machine in machines]) + "\n")


def machines_of(told: Iterable[dict[str, Any]]) -> list[Machine]:
    """Return the machines of the JSON objects that a head has told. Raises TypeError."""
    return [Machine(**one) for one in told]


def note_issued(folder: ClusterFolder, certificate: str, address: str) -> None:
    """Note a certificate, as PEM, which replaces the earlier one of the address. Raises FolderError."""

    def change(machines: list[Machine]) -> list[Machine]:
        kept = [one for one in machines if one.address != address or one.revoked_s is not None]
        return [*kept, Machine(fingerprint_of(certificate), address, time.time())]

    _change(folder, change)


def revoke(folder: ClusterFolder, address: str) -> int:
    """Revoke the certificates of an address; return how many were valid. Raises FolderError."""
    num_revoked = 0

    def change(machines: list[Machine]) -> list[Machine]:
        nonlocal num_revoked
        valid = [one for one in machines if one.address == address and one.revoked_s is None]
        num_revoked = len(valid)
        return [replace(one, revoked_s=time.time()) if one in valid else one for one in machines]

    _change(folder, change)
    return num_revoked


def _change(folder: ClusterFolder, change: Callable[[list[Machine]], list[Machine]]) -> None:
    try:
        lock = ProcessLock(folder.path / "machines.lock", LOCK_WAIT_S)
    except LockHeld as held:
        raise FolderError(f"{folder.tls.ledger} is being changed by {held.holder}") from None
    except OSError as error:
        raise FolderError(f"{folder.tls.ledger} cannot be changed: {error}") from None
    try:
        machines = change(Ledger(folder.tls.ledger).machines())
        while len(machines) > MAX_MACHINES:
            revoked = [one for one in machines if one.revoked_s is not None]
            if not revoked:
                raise FolderError(f"the cluster has {len(machines)} machines; the limit is {MAX_MACHINES}")
            machines.remove(min(revoked, key=lambda one: one.revoked_s or 0.0))
        write_machines(folder, machines)
    finally:
        lock.release()
