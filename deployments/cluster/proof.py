"""Proofs that the other end of a connection has the cluster's token, which itself is never sent."""

import hmac
from hashlib import sha256

NONCE = "X-Orchard-Nonce"
PROOF = "X-Orchard-Proof"


def proof_of_member(token: str, nonce: str, path: str) -> str:
    """Return what a member sends for a path; nonce: from the head."""
    return _mac(token, b"member", nonce, path.encode())


def proof_of_head(token: str, nonce: str, body: bytes) -> str:
    """Return what the head sends with its answer."""
    return _mac(token, b"head", nonce, body)


def _mac(token: str, role: bytes, nonce: str, content: bytes) -> str:
    message = b"\n".join((b"orchard join 1", role, nonce.encode(), content))
    return hmac.new(token.encode(), message, sha256).hexdigest()
