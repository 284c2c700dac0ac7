"""Asks the head of a cluster what a machine that wants to join must agree with."""

import hmac
import http.client
import json
import time
from dataclasses import dataclass
from typing import Any

from deployments.cluster import ports
from deployments.cluster.facts import Facts
from deployments.cluster.join_server import CHALLENGE_PATH, FACTS_PATH, TRANSFER_BYTES, TRANSFER_PATH
from deployments.cluster.proof import NONCE, PROOF, proof_of_head, proof_of_member

TIMEOUT_S = 20.0
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


class HeadClient:
    """The head.

    Args:
        head: HOST, or HOST:PORT.
        token: Of the cluster.
    """

    def __init__(self, head: str, token: str):
        host, _, port = head.rpartition(":") if head.count(":") == 1 else (head, "", "")
        if not host or (port and not port.isdigit()):
            raise HeadRefused(f"the head is {head!r}; it must be like 192.168.1.10, or 192.168.1.10:{ports.JOIN}")
        self._host, self._port = host, int(port or ports.JOIN)
        self._token = token

    def facts(self) -> HeadAnswer:
        """Ask for the facts. Raises HeadRefused."""
        asked_s = time.time()
        body, own_address = self._ask(FACTS_PATH, MAX_ANSWER_BYTES)
        answered_s = time.time()
        try:
            value: dict[str, Any] = json.loads(body)
            facts = Facts.of_json(value["facts"])
            offset = facts.time_s - (asked_s + answered_s) / 2
            return HeadAnswer(
                facts, value["gcs"], value["url"], value["resources"], value["seen_address"], own_address, offset
            )
        except (ValueError, KeyError, TypeError) as error:
            raise HeadRefused(
                f"{self._named()} is of another version of Orchard: its facts cannot be read ({error!r})"
            ) from None

    def bytes_per_s(self) -> float:
        """Measure a transfer from the head. Raises HeadRefused."""
        began = time.monotonic()
        self._ask(TRANSFER_PATH, TRANSFER_BYTES)
        return TRANSFER_BYTES / (time.monotonic() - began)

    def _ask(self, path: str, most: int) -> tuple[bytes, str]:
        """Return the answer to a question, and this machine's address on the way."""
        nonce = str(json.loads(self._get(CHALLENGE_PATH, {}, 4096)[0])["nonce"])
        headers = {NONCE: nonce, PROOF: proof_of_member(self._token, nonce, path)}
        body, proof, own_address = self._get(path, headers, most)
        if not hmac.compare_digest(proof.encode(), proof_of_head(self._token, nonce, body).encode()):
            raise HeadRefused(f"{self._named()} has not proved that it has the token: it is no head of this cluster")
        return body, own_address

    def _get(self, path: str, headers: dict[str, str], most: int) -> tuple[bytes, str, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=headers)
            own_address = connection.sock.getsockname()[0]
            answer = connection.getresponse()
            body = answer.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HeadRefused(
                f"no head answers at {self._named()} ({reason}). Start it there by `orchard serve --cluster`, which "
                "prints the command that joins it"
            ) from None
        finally:
            connection.close()
        if answer.status != 200 or len(body) > most:
            raise HeadRefused(f"{self._named()} answered {answer.status}: {body[:200].decode(errors='replace')}")
        return body, answer.headers.get(PROOF, ""), own_address

    def _named(self) -> str:
        return f"{self._host}:{self._port}"
