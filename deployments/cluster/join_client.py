"""Asks the head of a cluster what a machine that wants to join must agree with."""

import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlencode

from deployments.cluster import ports
from deployments.cluster.certificates import new_key, signing_request
from deployments.cluster.comparison import Line, Link, compare
from deployments.cluster.facts import Checkpoint, Facts, read_facts
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.issuing import SIGN_PATH, write_certificate
from deployments.cluster.join_server import FACTS_PATH, TRANSFER_BYTES, TRANSFER_PATH
from deployments.cluster.join_token import JoinToken
from deployments.cluster.ledger import Machine, machines_of, write_machines
from deployments.cluster.model_files import FILES_PATH, PIECE_BYTES, PIECE_PATH, ModelFile, ModelFiles
from deployments.cluster.mutual_tls import ClientTls, GuestTls, NotAdmitted, fetch_authority
from deployments.cluster.proof_client import TIMEOUT_S, NoAnswer, NotOfCluster, ProofClient, tls_reason

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
    """Ray resources of the head's node."""
    engines_per_node: Literal["all"] | int
    """The option of the configuration."""
    device: Literal["auto", "cpu", "gpu"]
    """The engine's option."""
    seen_address: str
    """Address from which the head sees this machine."""
    own_address: str
    """Address of this machine on its connection to the head."""
    clock_difference_s: float
    """Time of the head minus time of this machine, for half of the round trip each way."""
    term: int
    """Number of changes of the head, counted from 1; see headship.py."""


@dataclass(frozen=True)
class Enrolment:
    """The certificate and the secrets of a machine that joins."""

    key: str = field(repr=False)
    """Its private key, as PEM, which was made here."""
    certificate: str
    """Its certificate, as PEM."""
    token: str = field(repr=False)
    """Token that the machines of the cluster share."""
    machines: list[Machine]
    """The certificates of all machines."""


class HeadClient:
    """The head.

    Args:
        head: HOST, or HOST:PORT.
        token: Of the cluster, or the secret of the head's token.
        timeout_s: Longest silence of the head.
        tls: This machine's end of the connection; None: it is not encrypted.

    Attributes:
        authority: Certificate of the cluster's authority, as PEM, for a machine that has none; None: it has one.
    """

    def __init__(self, head: str, token: str, timeout_s: float = TIMEOUT_S, tls: ClientTls | None = None):
        self.authority = tls.authority if isinstance(tls, GuestTls) else None
        self._client = ProofClient(*_host_and_port(head), token, timeout_s, tls)

    def enrol(self, address: str) -> Enrolment:
        """Make a key, and ask for a certificate of it for an address of this machine. Raises HeadRefused."""
        key = new_key()
        fields = {"address": address, "request": signing_request(key, address)}
        body, _ = self._ask(f"{SIGN_PATH}?{urlencode(fields)}", MAX_ANSWER_BYTES)
        try:
            told = json.loads(body)
            return Enrolment(key, told["certificate"], told["token"], machines_of(told["machines"]))
        except (ValueError, KeyError, TypeError) as error:
            raise HeadRefused(f"{self._client} gives no certificate ({error!r})") from None

    def facts(self) -> HeadAnswer:
        """Ask for the facts. Raises HeadRefused."""
        asked_s = time.time()
        body, own_address = self._ask(FACTS_PATH, MAX_ANSWER_BYTES)
        answered_s = time.time()
        try:
            value: dict[str, Any] = json.loads(body)
            facts = Facts.of_json(value["facts"])
            offset = facts.time_s - (asked_s + answered_s) / 2
            engines = value["engines_per_node"], value["device"]
            known = value["gcs"], value["url"], value["resources"], *engines, value["seen_address"]
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

    def model_files(self, model: Checkpoint) -> ModelFiles:
        """Ask for the files of a model that the cluster serves. Raises HeadRefused."""
        body, _ = self._ask(f"{FILES_PATH}?{urlencode(_named(model))}", MAX_ANSWER_BYTES)
        try:
            return ModelFiles.of_json(json.loads(body))
        except (ValueError, KeyError, TypeError) as error:
            raise HeadRefused(f"{self._client} does not tell the files of {model.model} ({error!r})") from None

    def model_piece(self, model: Checkpoint, file: ModelFile, start: int) -> bytes:
        """Ask for up to PIECE_BYTES of a file from byte `start` on. Raises HeadRefused."""
        fields = {**_named(model), "file": file.name, "start": start, "changed_ns": file.changed_ns}
        return self._ask(f"{PIECE_PATH}?{urlencode(fields)}", PIECE_BYTES)[0]

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


def guest_client(head: str, token: JoinToken) -> HeadClient:
    """Return a head for a machine without a certificate, after it was recognized by its own. Raises HeadRefused."""
    host, port = _host_and_port(head)
    if token.fingerprint is None:
        return HeadClient(head, token.secret)
    try:
        return HeadClient(head, token.secret, tls=fetch_authority(host, port, token.fingerprint, TIMEOUT_S))
    except (ssl.SSLError, NotAdmitted) as error:
        raise HeadRefused(f"{head} is not the head of the token: {tls_reason(error)}") from None
    except OSError as error:
        raise HeadRefused(
            f"no head answers at {host}:{port} ({error.strerror or error}). Start it there by `orchard serve "
            "--cluster`, which prints the command that joins it"
        ) from None


def enrol(folder: ClusterFolder, head: HeadClient, token: JoinToken | None, address: str) -> None:
    """Write what this machine needs as a member; with TLS a new certificate.

    Args:
        folder: Of this machine.
        head: The head.
        token: The head's token; None: this machine has a certificate of the cluster.
        address: Address of this machine.

    Raises:
        HeadRefused: The head gives no certificate.
        FolderError: A file cannot be written.
    """
    folder.make()
    if token is not None and token.fingerprint is None:
        folder.forget_certificate()
        folder.write(folder.join_token, f"{token}\n")
        folder.write_token(token.secret)
        return
    got = head.enrol(address)
    folder.join_token.unlink(missing_ok=True)
    if head.authority is not None:
        folder.tls.authority_key.unlink(missing_ok=True)  # of another cluster, perhaps
        folder.write(folder.tls.authority, head.authority)
    write_certificate(folder, got.key, got.certificate)
    write_machines(folder, got.machines)
    folder.write_token(got.token)


def _named(model: Checkpoint) -> dict[str, str]:
    return {"model": model.model} | ({"revision": model.revision} if model.revision else {})


def _host_and_port(head: str) -> tuple[str, int]:
    host, _, port = head.rpartition(":") if head.count(":") == 1 else (head, "", "")
    if not host or (port and not port.isdigit()):
        raise HeadRefused(f"the head is {head!r}; it must be like 192.168.1.10, or 192.168.1.10:{ports.JOIN}")
    return host, int(port or ports.JOIN)


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
