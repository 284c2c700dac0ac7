"""ProofClient: asks a ProofServer of the cluster."""

import hmac
import http.client
import json
import ssl

from deployments.cluster.folder import FolderError
from deployments.cluster.mutual_tls import ClientTls, NotAdmitted
from deployments.cluster.proof import NONCE, PROOF, proof_of_head, proof_of_member
from deployments.cluster.proof_server import CHALLENGE_PATH

TIMEOUT_S = 20.0
MAX_CHALLENGE_BYTES = 4096


class NoAnswer(Exception):
    """Nothing answers there; the message says why."""


class NotOfCluster(Exception):
    """The other end refuses, or has not proved that it has the token; the message says which."""


class Revoked(NotOfCluster):
    """The certificate of this machine was revoked."""


class ProofClient:
    """The other end.

    Args:
        host: Its address.
        port: Its port.
        token: Of the cluster.
        timeout_s: Longest silence.
        tls: This machine's end of the connection; None: it is not encrypted.
    """

    def __init__(self, host: str, port: int, token: str, timeout_s: float = TIMEOUT_S, tls: ClientTls | None = None):
        self._host, self._port = host, port
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls

    def ask(self, path: str, most: int) -> tuple[bytes, str]:
        """Return the answer to a question of at most so many bytes, and this machine's address on the way there.

        Raises:
            NoAnswer: Nothing answers.
            NotOfCluster: The answer is no answer of this cluster.
            Revoked: The certificate of this machine was revoked.
        """
        try:
            nonce = str(json.loads(self._get(CHALLENGE_PATH, {}, MAX_CHALLENGE_BYTES)[0])["nonce"])
        except (ValueError, KeyError, TypeError):
            raise NotOfCluster(f"{self} gives no nonce: it is no machine of this cluster") from None
        headers = {NONCE: nonce, PROOF: proof_of_member(self._token, nonce, path)}
        body, proof, own_address = self._get(path, headers, most)
        if not hmac.compare_digest(proof.encode(), proof_of_head(self._token, nonce, body).encode()):
            raise NotOfCluster(f"{self} has not proved that it has the token: it is no machine of this cluster")
        return body, own_address

    def _get(self, path: str, headers: dict[str, str], most: int) -> tuple[bytes, str, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            if self._tls is not None:
                connection.sock = self._tls.connect(connection.sock)
            connection.request("GET", path, headers=headers)
            own_address = connection.sock.getsockname()[0]
            answer = connection.getresponse()
            body = answer.read(most + 1)
        except (ssl.SSLError, NotAdmitted, FolderError) as error:
            raise NotOfCluster(f"{self} is no machine of this cluster: {tls_reason(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
        finally:
            connection.close()
        if answer.status == 403 and _reason_in(body) == "revoked":
            raise Revoked(f"{self} refuses this machine: its certificate was revoked")
        if answer.status != 200 or len(body) > most:
            raise NotOfCluster(f"{self} answered {answer.status}: {body[:200].decode(errors='replace')}")
        return body, answer.headers.get(PROOF, ""), own_address

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"


def tls_reason(error: Exception) -> str:
    """Return why an encrypted connection has failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        return "it does not speak TLS" if reason in PLAIN else f"TLS has failed ({reason})"
    return str(error)


PLAIN = ("wrong version number", "record layer failure", "http request")
"""OpenSSL's reasons when the other end does not speak TLS."""


def _reason_in(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return ""
