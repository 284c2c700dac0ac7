"""JoinToken: what the head prints for `orchard join`: a secret, and by which certificate the head is recognized."""

import re
import secrets
from dataclasses import dataclass, field

from deployments.cluster.folder import TOKEN_BYTES, ClusterFolder, FolderError

_TOKEN = re.compile(r"orchard1-([0-9a-f]{64})-([0-9a-f]{64}|no-tls)")
_EARLIER = re.compile(r"[0-9a-f]{64}")


class BadToken(Exception):
    """A text is no token; the message is for the operator."""


@dataclass(frozen=True)
class JoinToken:
    """A token."""

    secret: str = field(repr=False)
    """Proved to the head, and by it. With TLS, another one than the token that the machines share."""
    fingerprint: str | None
    """SHA-256 of the certificate of the cluster's authority; None: the cluster has no TLS."""

    def __str__(self) -> str:
        return f"orchard1-{self.secret}-{self.fingerprint or 'no-tls'}"

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Parse a token. Raises BadToken."""
        found = _TOKEN.fullmatch(text)
        if found is not None:
            return cls(found[1], None if found[2] == "no-tls" else found[2])
        if _EARLIER.fullmatch(text):
            raise BadToken(
                "this token does not tell by which certificate the head is recognized: it is of an earlier version of "
                "Orchard. Give the one that the head prints now (~/.orchard/cluster/join_token there)"
            )
        raise BadToken(
            f"a token of {len(text)} characters is none that a head prints, `orchard1-` and two parts: copy it whole "
            "(~/.orchard/cluster/join_token on the head)"
        )


def read_join_token(folder: ClusterFolder) -> JoinToken | None:
    """Return the token in a folder; None if there is none. Raises FolderError."""
    try:
        return JoinToken.parse(folder.join_token.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, BadToken) as error:
        raise FolderError(f"{folder.join_token} cannot be read: {error}; delete it for a new one") from None


def renew_join_token(folder: ClusterFolder, fingerprint: str | None) -> JoinToken:
    """Write a token, with a new secret if the cluster has TLS. Raises FolderError."""
    secret = folder.token() if fingerprint is None else secrets.token_hex(TOKEN_BYTES)
    token = JoinToken(secret, fingerprint)
    folder.write(folder.join_token, f"{token}\n")
    return token
