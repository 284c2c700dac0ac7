"""Asks the head of a cluster what a machine that wants to join must agree with."""

import json
import time
from dataclasses import dataclass
from typing import Any

from deployments.cluster import ports
from deployments.cluster.comparison import Line, Link, compare
from deployments.cluster.facts import Facts, read_facts
from deployments.cluster.join_server import FACTS_PATH, TRANSFER_BYTES, TRANSFER_PATH
from deployments.cluster.proof_client import TIMEOUT_S, NoAnswer, NotOfCluster, ProofClient

MAX_ANSWER_BYTES = 2**20


class HeadRefused(Exception):
    """The head does not answer, or not as the head of the token's cluster; the message is for the operator."""


@dataclass(frozen=True)
class HeadAnswer:
    """The answer of the head."""

    facts: Facts
    gcs: str
    """ADDRESS:PORT of Ray's GCS."""
    url: str
    """URL of the server on each machine."""
    resources: dict[str, float]
    """Ray resources of a node."""
    seen_address: str
    """Address from which the head sees this machine."""
    own_address: str
    """Address of this machine on its connection to the head."""
    clock_difference_s: float
    """Time of the head minus time of this machine, for half of the round trip each way."""
    term: int
    """Number of changes of the head, counted from 1; see headship.py."""


class HeadClient:
    """The head.

    Args:
        head: HOST, or HOST:PORT.
        token: Of the cluster.
        timeout_s: Longest silence of the head.
    """

    def __init__(self, head: str, token: str, timeout_s: float = TIMEOUT_S):
        host, _, port = head.rpartition(":") if head.count(":") == 1 else (head, "", "")
        if not host or (port and not port.isdigit()):
            raise HeadRefused(f"the head is {head!r}; it must be like 192.168.1.10, or 192.168.1.10:{ports.JOIN}")
        self._client = ProofClient(host, int(port or ports.JOIN), token, timeout_s)

    def facts(self) -> HeadAnswer:
        """Ask for the facts. Raises HeadRefused."""
        asked_s = time.time()
        body, own_address = self._ask(FACTS_PATH, MAX_ANSWER_BYTES)
        answered_s = time.time()
        try:
            value: dict[str, Any] = json.loads(body)
            facts = Facts.of_json(value["facts"])
            offset = facts.time_s - (asked_s + answered_s) / 2
            known = value["gcs"], value["url"], value["resources"], value["seen_address"]
            return HeadAnswer(facts, *known, own_address, offset, value["term"])
        except (ValueError, KeyError, TypeError) as error:
            raise HeadRefused(
                f"{self._client} is of another version of Orchard: its facts cannot be read ({error!r})"
            ) from None

    def bytes_per_s(self) -> float:
        """Measure a transfer from the head. Raises HeadRefused."""
        began = time.monotonic()
        self._ask(TRANSFER_PATH, TRANSFER_BYTES)
        return TRANSFER_BYTES / (time.monotonic() - began)

    def _ask(self, path: str, most: int) -> tuple[bytes, str]:
        """Return the answer to a question, and this machine's address on the way."""
        try:
            return self._client.ask(path, most)
        except NoAnswer as reason:
            raise HeadRefused(
                f"no head answers at {self._client} ({reason}). Start it there by `orchard serve --cluster`, which "
                "prints the command that joins it"
            ) from None
        except NotOfCluster as refused:
            raise HeadRefused(str(refused)) from None


def compare_with_head(head: HeadClient, answer: HeadAnswer, address: str) -> list[Line]:
    """Compare this machine with the head; return one line for each thing that is compared.

    Args:
        head: The head.
        answer: Its facts.
        address: Address of this machine, for Ray.

    Raises:
        HeadRefused: The head does not answer.
    """
    own = read_facts((checkpoint.model, checkpoint.revision) for checkpoint in answer.facts.checkpoints)
    host = answer.gcs.rpartition(":")[0]
    link = Link(answer.clock_difference_s, head.bytes_per_s(), address, answer.seen_address, host)
    return compare(answer.facts, own, link)
