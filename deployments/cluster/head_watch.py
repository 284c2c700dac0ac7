"""HeadWatch: a member's view of its head. It reports there, copies the log if it is asked to, and follows a new head.

A head that is silent may have been replaced: the other members are asked then, and the highest term is right.
"""

import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.head_service import LOG_PATH, MEMBER_PATH
from deployments.cluster.headship import Headship, read_headship, write_headship
from deployments.cluster.ledger import machines_of, write_machines
from deployments.cluster.log_copy import CopyFailed, LogCopy, copied_s
from deployments.cluster.log_source import MAX_PIECE_BYTES, Piece
from deployments.cluster.members import Report
from deployments.cluster.mutual_tls import MachineTls
from deployments.cluster.proof_client import NoAnswer, NotOfCluster, ProofClient, Revoked
from deployments.cluster.proof_server import Question

HEAD_PATH = "/head"
"""Path at which a member answers which machine is the head."""
ASK_S = 3.0
"""Longest silence of a machine that is asked."""
PEERS_AFTER_S = 4.0
"""Silence of the head after which the other members are asked."""
MAX_ANSWER_BYTES = 4 * 2**20
MAX_PIECES = 64
"""Pieces of the log that are copied in a row, before the head is heard again."""


class HeadWatch:
    """The view. `tick` is called in one thread, `answer` in any.

    Args:
        folder: Of this machine.
        token: Of the cluster.
        headship: The head that was joined.
        report: Returns this machine's report, without its copy.
        on_change: Called with a new head.
        tls: This machine's end of the connections; None: they are not encrypted.

    Attributes:
        headship: The head.
    """

    def __init__(
        self,
        folder: ClusterFolder,
        token: str,
        headship: Headship,
        report: Callable[[], Report],
        on_change: Callable[[Headship], None],
        tls: MachineTls | None = None,
    ):
        """Note the headship. Raises FolderError."""
        self.headship = headship
        self._folder = folder
        self._token = token
        self._tls = tls
        self._report = report
        self._on_change = on_change
        self._copy = LogCopy(folder.log_copy)
        self._members: list[dict[str, Any]] = []
        self._has_copy = False
        self._digest = ""
        self._heard = time.monotonic()
        write_headship(folder, headship)

    @property
    def silent_s(self) -> float:
        """Seconds since the head has answered, or since it became the head."""
        return time.monotonic() - self._heard

    def tick(self) -> bool:
        """Ask once; return whether the head has answered. Raises FolderError, OSError, Revoked."""
        noted = read_headship(self._folder)  # another process of this machine may have made it the head
        if noted is not None:
            self._follow(noted)
        if self._hear():
            return True
        if self.silent_s >= PEERS_AFTER_S:
            self._ask_members()
        return False

    def answer(self, question: Question) -> bytes:
        """Answer another machine, or a command of this one, which machine is the head."""
        view = {
            **asdict(self.headship),
            "own_address": self._report().address,
            "heard_age_s": round(self.silent_s, 1),
            "has_copy": self._has_copy,
            "members": self._members,
        }
        return json.dumps(view).encode()

    def _follow(self, headship: Headship) -> None:
        if headship.term > self.headship.term:
            self.headship, self._heard, self._digest = headship, time.monotonic(), ""
            write_headship(self._folder, headship)
            self._on_change(headship)

    def _hear(self) -> bool:
        """Report to the head, and copy the log; return whether it has answered."""
        report = self._report()
        since = copied_s(self._folder.log_copy)
        if since is not None and report.address != self.headship.address:
            report = Report(**{**asdict(report), "copy_age_s": max(0.0, time.time() - since)})
        try:
            told = self._ask_head(MEMBER_PATH, {**report.as_fields(), **self._needs(), "digest": self._digest})
            self._follow(Headship(told["address"], int(told["term"])))
            if int(told["term"]) < self.headship.term:
                return False  # a head that was replaced, and does not know it yet
            self._members, self._has_copy = told["members"], told["has_copy"]
            self._keep(told)
            self._heard = time.monotonic()
            if self._has_copy:
                self._pull(report.address)
        except Revoked:
            raise
        except (NoAnswer, NotOfCluster, CopyFailed, ValueError, KeyError, TypeError):
            return False
        return True

    def _needs(self) -> dict[str, str]:
        """Return the field that asks for the authority's key, which a machine with a copy of the log has as well."""
        is_needed = self._tls is not None and self._has_copy and not self._folder.tls.authority_key.exists()
        return {"needs_authority": "1"} if is_needed else {}

    def _keep(self, told: dict[str, Any]) -> None:
        """Write what the head has told. Raises FolderError, KeyError, TypeError, ValueError."""
        if "authority_key" in told:
            self._folder.write(self._folder.tls.authority_key, told["authority_key"])
        if "shared" in told:
            self._folder.write(self._folder.shared, told["shared"])
            is_head = self._report().address == self.headship.address  # whose own process writes the ledger
            if self._tls is not None and not is_head:
                write_machines(self._folder, machines_of(json.loads(told["shared"])["machines"]))
            self._digest = told["digest"]

    def _pull(self, address: str) -> None:
        """Copy what the log has more than the copy. Raises NoAnswer, NotOfCluster, CopyFailed, ValueError, OSError."""
        for _ in range(MAX_PIECES):
            generation, offset = self._copy.position
            fields = {"address": address, "generation": generation, "offset": str(offset)}
            body, _ = self._head().ask(f"{LOG_PATH}?{urlencode(fields)}", MAX_PIECE_BYTES)
            if self._copy.add(Piece.unpack(body)):
                return

    def _ask_members(self) -> None:
        addresses = [member["address"] for member in self._members if member["address"] != self._report().address]
        for told in ask_all(addresses, self._token, self._tls).values():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._follow(Headship(told["address"], int(told["term"])))

    def _head(self) -> ProofClient:
        return ProofClient(self.headship.address, ports.JOIN, self._token, ASK_S, self._tls)

    def _ask_head(self, path: str, fields: dict[str, str]) -> dict[str, Any]:
        return json.loads(self._head().ask(f"{path}?{urlencode(fields)}", MAX_ANSWER_BYTES)[0])


def ask_all(addresses: list[str], token: str, tls: MachineTls | None) -> dict[str, dict[str, Any]]:
    """Ask members at the same time which machine is the head; return the answers of those that give one."""

    def ask(address: str) -> dict[str, Any] | None:
        client = ProofClient(address, ports.MEMBER, token, ASK_S, tls)
        try:
            told = json.loads(client.ask(HEAD_PATH, MAX_ANSWER_BYTES)[0])
        except (NoAnswer, NotOfCluster, ValueError):
            return None
        return told if isinstance(told, dict) else None

    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as threads:
        found = dict(zip(addresses, threads.map(ask, addresses), strict=True))
    return {address: told for address, told in found.items() if told is not None}
