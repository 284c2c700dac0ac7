"""The greeting of a connection: both ends prove that they have the same token, model, format and version.

    server  MAGIC, version, 32 random bytes
    client  MAGIC, version, 32 random bytes, SHA-256 of format and of fingerprint, proof
    server  verdict, proof

A proof is the HMAC-SHA-256, with the token as its key, of the name of the end and everything that was sent before; the
token itself is never sent. A refusal has no proof. In a cluster with TLS, the connection is encrypted from its first
byte on, and both ends show certificates. Without, what follows the greeting is neither encrypted nor authenticated:
CRC-32 detects accidents, not attackers that can change packets.
"""

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from engine.snapshot_store.format import FORMAT
from engine.snapshot_store.wire import Channel, FetchFailure, PeerError, PeerTls

MAGIC = b"ORCHSNAP"
VERSION = 1

GREETING_S = 5.0
"""Longest time for each of the three messages."""

VERDICTS: tuple[FetchFailure | None, ...] = (None, "version", "token", "format", "fingerprint", "busy")
"""Why a client is refused, by the byte that stands for it; None: it is accepted."""

_OPENING = struct.Struct("<8sH32s")
_CLAIM = struct.Struct("<8sH32s32s32s")
_PROOF_BYTES = 32
_NO_PROOF = bytes(_PROOF_BYTES)


@dataclass(frozen=True)
class Identity:
    """What both ends of a connection must have in common."""

    token: bytes
    """Secret of the cluster."""
    fingerprint: str
    """Fingerprint of the model, as in the files of the disk tier."""
    tls: PeerTls | None = None
    """This node's end of encrypted connections; None: they are not encrypted."""

    def proof(self, end: bytes, before: bytes) -> bytes:
        """Return the proof of an end, b"server" or b"client", for the bytes that were sent before."""
        return hmac.new(self.token, end + before, sha256).digest()


def greet(channel: Channel, identity: Identity) -> None:
    """Greet a server.

    Raises:
        PeerError: The server refuses, does not know the token itself, or does not answer in time.
    """
    is_encrypted = False
    try:
        if identity.tls is not None:
            channel.encrypt(identity.tls.connect, GREETING_S)
            is_encrypted = True
        opening = channel.receive_bytes(_OPENING.size, GREETING_S)
    except PeerError as error:
        if error.reason == "cut" and is_encrypted:
            raise PeerError("certificate", "the server refuses the certificate of this node") from None
        if error.reason == "cut":
            raise PeerError("busy", "the server closed the connection without a greeting") from None
        raise
    magic, version, _ = _OPENING.unpack(opening)
    if magic != MAGIC:
        raise PeerError("protocol", f"the server greets with {magic!r} instead of {MAGIC!r}")
    claim = _CLAIM.pack(MAGIC, VERSION, secrets.token_bytes(32), _digest(FORMAT), _digest(identity.fingerprint))
    channel.send_bytes(claim + identity.proof(b"client", opening + claim), GREETING_S)
    verdict, *proof = channel.receive_bytes(1 + _PROOF_BYTES, GREETING_S)
    if verdict >= len(VERDICTS):
        raise PeerError("protocol", f"the server answers the greeting with {verdict}")
    if (reason := VERDICTS[verdict]) is not None:
        raise PeerError(reason, f"the server refuses: {_refusal(reason, version)}")
    if not hmac.compare_digest(bytes(proof), identity.proof(b"server", opening + claim)):
        raise PeerError("token", "the server does not have the token of this cluster")


def admit(channel: Channel, identity: Identity, enter: Callable[[], bool]) -> None:
    """Greet a client, and refuse it with a reason if it does not match.

    Args:
        channel: The connection.
        identity: What the client must have.
        enter: Counts a client that matches; returns False if too many are connected, so that it is refused as well.

    Raises:
        PeerError: The client is refused, or does not answer in time.
    """
    if identity.tls is not None:
        channel.encrypt(identity.tls.accept_machine, GREETING_S)
    opening = _OPENING.pack(MAGIC, VERSION, secrets.token_bytes(32))
    channel.send_bytes(opening, GREETING_S)
    message = channel.receive_bytes(_CLAIM.size + _PROOF_BYTES, GREETING_S)
    claim, proof = message[: _CLAIM.size], message[_CLAIM.size :]
    magic, version, _, format_digest, fingerprint_digest = _CLAIM.unpack(claim)
    reason: FetchFailure | None = None
    if (magic, version) != (MAGIC, VERSION):
        reason = "version"
    elif not hmac.compare_digest(proof, identity.proof(b"client", opening + claim)):
        reason = "token"
    elif format_digest != _digest(FORMAT):
        reason = "format"
    elif fingerprint_digest != _digest(identity.fingerprint):
        reason = "fingerprint"
    elif not enter():
        reason = "busy"
    answer = identity.proof(b"server", opening + claim) if reason is None else _NO_PROOF
    channel.send_bytes(bytes([VERDICTS.index(reason)]) + answer, GREETING_S)
    if reason is not None:
        raise PeerError(reason, f"a client was refused: {_refusal(reason, version)}")


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _refusal(reason: FetchFailure, version: int) -> str:
    return {
        "version": f"its version of the protocol is {version}, not {VERSION}",
        "token": "its token is another one",
        "format": f"its snapshots are not of the format {FORMAT}",
        "fingerprint": "its model is another one",
        "busy": "too many clients are connected",
    }[reason]
