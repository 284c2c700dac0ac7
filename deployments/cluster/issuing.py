"""Issuing: the head's authority, and the certificates that it gives to itself and to machines that join."""

import json
from dataclasses import asdict

from deployments.cluster.certificates import (
    Authority,
    RequestRefused,
    days_left,
    new_key,
    signing_request,
)
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.join_token import JoinToken, read_join_token, renew_join_token
from deployments.cluster.ledger import Ledger, fingerprint_of, note_issued
from deployments.cluster.proof_server import Answer, BadQuestion, Question

SIGN_PATH = "/sign"


def prepare_head(folder: ClusterFolder, address: str) -> JoinToken:
    """Make what a head needs and does not have: an authority, its own certificate, and a token for those that join.

    Raises:
        FolderError: A file cannot be read or written, or this machine does not have the authority's key.
    """
    tls = folder.tls
    if not tls.authority.exists():
        made = Authority.new()
        folder.write(tls.authority_key, made.key)
        folder.write(tls.authority, made.certificate)
    authority = read_authority(folder)
    if not _is_current(folder, address):
        key = new_key()
        certificate = authority.issue(signing_request(key, address), address)
        note_issued(folder, certificate, address)
        write_certificate(folder, key, certificate)
    fingerprint = fingerprint_of(authority.certificate)
    token = read_join_token(folder)
    return token if token is not None and token.fingerprint == fingerprint else renew_join_token(folder, fingerprint)


def read_authority(folder: ClusterFolder) -> Authority:
    """Return the authority of this head's cluster. Raises FolderError."""
    try:
        return Authority(folder.tls.authority.read_text(), folder.tls.authority_key.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(
            f"the authority of the cluster, {folder.tls.authority} and its key, cannot be read: {error}. Start a new "
            "cluster with --new-cluster, which the other machines must join with its token"
        ) from None


def write_certificate(folder: ClusterFolder, key: str, certificate: str) -> None:
    """Write this machine's certificate and key, both as PEM. Raises FolderError."""
    folder.write(folder.tls.key, key)
    folder.write(folder.tls.certificate, certificate)


def signing_answer(folder: ClusterFolder) -> Answer:
    """Return the answer to machines that ask for a certificate: it, the cluster's token, and its machines."""

    def answer(question: Question) -> bytes:
        address = question.fields.get("address", "")
        if address != question.sender:
            raise BadQuestion(f"a certificate for {address} is asked for from {question.sender}")
        try:
            certificate = read_authority(folder).issue(question.fields.get("request", ""), address)
            note_issued(folder, certificate, address)
            machines = [asdict(machine) for machine in Ledger(folder.tls.ledger).machines()]
            told = {"certificate": certificate, "token": folder.token(), "machines": machines}
        except (RequestRefused, FolderError) as problem:
            raise BadQuestion(str(problem)) from None
        return json.dumps(told).encode()

    return answer


def _is_current(folder: ClusterFolder, address: str) -> bool:
    """Tell whether this machine has a valid certificate of its address in the ledger."""
    try:
        certificate = folder.tls.certificate.read_text()
        fingerprint = fingerprint_of(certificate)
        machines = Ledger(folder.tls.ledger).machines()
        is_known = any((one.fingerprint, one.address) == (fingerprint, address) for one in machines)
        return folder.tls.key.exists() and is_known and days_left(certificate) > 0
    except (OSError, ValueError):
        return False
