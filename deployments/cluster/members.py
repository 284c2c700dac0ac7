"""Members: the machines that have joined, as the head hears from them every few seconds; two of them copy its log."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.cluster.folder import ClusterFolder, FolderError

FILE = "members.json"
NUM_COPIES = 2
ANSWERS_S = 10.0
"""A member that was heard within so many seconds answers."""
SHOWN_S = 600.0
MAX_MEMBERS = 64
"""Limit of the members that the head remembers; beyond it, the one heard longest ago is forgotten."""


@dataclass(frozen=True)
class Report:
    """A member's own statement."""

    address: str
    node_id: str
    """Ray's id of it; '' while its Ray does not run."""
    joined_s: float
    """When it has joined, in seconds since 1970."""
    copy_age_s: float | None
    """Seconds since its copy was equal to the log; None: it has no copy."""

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> "Report":
        """Return the report of a question. Raises ValueError."""
        try:
            age = fields.get("copy_age_s")
            return cls(
                fields["address"],
                fields.get("node_id", ""),
                float(fields["joined_s"]),
                None if age is None else float(age),
            )
        except KeyError as missing:
            raise ValueError(f"a member's report has no {missing}") from None

    def as_fields(self) -> dict[str, str]:
        """Return the fields of a question."""
        fields = {"address": self.address, "node_id": self.node_id, "joined_s": repr(self.joined_s)}
        return fields if self.copy_age_s is None else {**fields, "copy_age_s": f"{self.copy_age_s:.1f}"}


class Members:
    """The members. Its methods may be called in any thread.

    Args:
        folder: Where their addresses are noted, for the head's return.
        own_address: Of the head: a member on the same machine gets no copy.
    """

    def __init__(self, folder: ClusterFolder, own_address: str):
        self._folder = folder
        self._own_address = own_address
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[Report, float]] = {}
        """Address to the last report and its time, in the order of their times."""
        self._noted: list[str] = noted_addresses(folder)

    def hear(self, report: Report) -> None:
        """Record a report. Raises FolderError: the address of a new member cannot be noted."""
        with self._lock:
            self._heard.pop(report.address, None)
            self._heard[report.address] = report, time.monotonic()
            while len(self._heard) > MAX_MEMBERS:
                del self._heard[next(iter(self._heard))]
            if report.address not in self._noted and report.address != self._own_address:
                self._noted = [*self._noted, report.address][-MAX_MEMBERS:]
                self._folder.write(self._folder.path / FILE, json.dumps(self._noted) + "\n")

    def has_copy(self, address: str) -> bool:
        """Tell whether a member is one of the NUM_COPIES longest in the cluster that answer."""
        now = time.monotonic()
        with self._lock:
            answering = [
                report
                for report, heard in self._heard.values()
                if now - heard < ANSWERS_S and report.address != self._own_address
            ]
        answering.sort(key=lambda report: (report.joined_s, report.address))
        return address in [report.address for report in answering[:NUM_COPIES]]

    def view(self) -> list[dict[str, Any]]:
        """Return what is known of each member, as JSON objects with ages in seconds."""
        now = time.monotonic()
        with self._lock:
            heard = list(self._heard.values())
        return [
            {
                "address": report.address,
                "node_id": report.node_id,
                "joined_s": report.joined_s,
                "heard_age_s": round(now - at, 1),
                "copy_age_s": None if report.copy_age_s is None else round(report.copy_age_s + now - at, 1),
                "has_copy": self.has_copy(report.address),
            }
            for report, at in heard
            if now - at < SHOWN_S
        ]


def noted_addresses(folder: ClusterFolder) -> list[str]:
    """Return the addresses of the members that were noted. Raises FolderError."""
    file = folder.path / FILE
    try:
        return [str(address) for address in json.loads(file.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(f"{file} cannot be read: {error}") from None
