"""HeadService: what the head answers its members: who is the head, what it serves, and the log to copy."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from deployments.cluster.append_log import LogDamaged
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.headship import Headship
from deployments.cluster.issuing import SIGN_PATH, signing_answer
from deployments.cluster.ledger import Ledger
from deployments.cluster.log_source import LogSource
from deployments.cluster.members import Members, Report
from deployments.cluster.proof_server import Answer, BadQuestion, Question

MEMBER_PATH, LOG_PATH, ADOPTED_PATH = "/member", "/log", "/adopted"


class HeadService:
    """The answers.

    Args:
        folder: Of this machine.
        headship: This machine as the head.
        cluster: Id of the cluster; a new one of the same machine and token has another one.
        shared: Returns what another machine needs to become the head: a JSON object.
        on_adopted: Called with the headship of a machine that has taken the cluster over.
    """

    def __init__(
        self,
        folder: ClusterFolder,
        headship: Headship,
        cluster: str,
        shared: Callable[[], dict[str, Any]],
        on_adopted: Callable[[Headship], None],
    ):
        self._folder = folder
        self._headship = headship
        self._cluster = cluster
        self._shared = shared
        self._on_adopted = on_adopted
        self._members = Members(folder, headship.address)
        self._log = LogSource(folder.store_log)
        self._ledger = Ledger(folder.tls.ledger)

    def answers(self) -> Mapping[str, Answer]:
        """Return path to answer."""
        answers = {MEMBER_PATH: self._hear, LOG_PATH: self._read_log, ADOPTED_PATH: self._end}
        return answers | ({SIGN_PATH: signing_answer(self._folder)} if self._folder.tls.authority_key.exists() else {})

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _hear(self, question: Question) -> bytes:
        """Answer a member's report. A question without `address` is none, and asks only for the view."""
        told: dict[str, Any] = {"address": self._headship.address, "term": self._headship.term}
        if "address" in question.fields:
            report = Report.of_fields(question.fields)
            try:
                self._members.hear(report)
            except FolderError as error:
                raise BadQuestion(str(error)) from None
            told["has_copy"] = self._members.has_copy(report.address)
            if told["has_copy"] and "needs_authority" in question.fields:
                told["authority_key"] = self._authority_key()
            machines = [asdict(machine) for machine in self._ledger.machines()]  # none without TLS
            known = {**self._shared(), "machines": machines} if machines else self._shared()
            shared = json.dumps(known, sort_keys=True, default=str)
            told["digest"] = sha256(shared.encode()).hexdigest()
            if question.fields.get("digest") != told["digest"]:
                told["shared"] = shared
        return json.dumps({**told, "members": self._members.view()}).encode()

    def _authority_key(self) -> str:
        """Return the key with which a copy of the log can issue certificates once its machine is the head."""
        try:
            return self._folder.tls.authority_key.read_text()
        except OSError as error:
            raise BadQuestion(f"the authority's key cannot be read: {error}") from None

    def _read_log(self, question: Question) -> bytes:
        address = question.fields.get("address", "")
        if not self._members.has_copy(address):
            raise BadQuestion(f"{address or 'a machine without an address'} is none of the machines that copy the log")
        try:
            offset = int(question.fields.get("offset", "0"))
            return self._log.read(question.fields.get("generation", ""), offset).pack()
        except (OSError, LogDamaged) as problem:
            raise BadQuestion(f"the log cannot be read: {problem}") from None

    def _end(self, question: Question) -> bytes:
        try:
            headship = Headship(question.fields["by"], int(question.fields["term"]))
        except KeyError as missing:
            raise BadQuestion(f"no {missing}") from None
        if (cluster := question.fields.get("cluster", "")) != self._cluster:
            raise BadQuestion(f"this head is that of cluster {self._cluster}, not of {cluster}")
        if headship.term <= self._headship.term:
            raise BadQuestion(f"term {headship.term} is not above {self._headship.term}, that of this head")
        self._on_adopted(headship)
        return b"{}"
