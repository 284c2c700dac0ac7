"""Admission: which machines may ask a ProofServer, and by which secret they and the server prove themselves."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deployments.cluster.folder import FolderError
from deployments.cluster.mutual_tls import MachineTls

REFUSALS = {
    "none": "it has no certificate of this cluster, which `orchard join HEAD --token TOKEN` gets",
    "revoked": "its certificate was revoked",
    "unknown": "its certificate was replaced, or this machine does not know it yet",
}
"""Why a machine is refused, by the standing of its certificate."""


class Refused(Exception):
    """A question is refused: HTTP status, a message, and the standing of the certificate if that is why."""

    def __init__(self, status: int, message: str, reason: str = ""):
        super().__init__(status, message, reason)
        self.status, self.message, self.reason = status, message, reason


@dataclass(frozen=True)
class Guests:
    """The machines without a certificate."""

    paths: frozenset[str]
    """Paths that are answered to them."""
    secret: Callable[[], str]
    """Returns the secret that they prove, which changes. Raises FolderError."""
    shown: Mapping[str, bytes] = field(default_factory=dict)
    """Path to what is shown there without any proof."""


@dataclass(frozen=True)
class Admission:
    """The rule."""

    token: str = field(repr=False)
    """Token of the cluster."""
    tls: MachineTls | None = None
    """This machine's end of the connections; None: nothing is encrypted, and the token is enough."""
    guests: Guests | None = None

    def secret_for(self, path: str, connection: object) -> str:
        """Return the secret that the sender of a question must prove. Raises Refused."""
        if self.tls is None:
            return self.token
        assert isinstance(connection, ssl.SSLSocket)
        try:
            standing = self.tls.standing(connection)
            if standing == "none" and self.guests is not None and path in self.guests.paths:
                return self.guests.secret()
        except FolderError as error:
            raise Refused(503, str(error)) from None
        if standing != "admitted":
            raise Refused(403, REFUSALS[standing], standing)
        return self.token
