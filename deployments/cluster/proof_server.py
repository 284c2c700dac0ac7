"""ProofServer: answers questions of those who prove that they have the cluster's token, at a port of its own.

It is no path of the ingress, because a machine must be able to ask before it belongs to the cluster, while the ingress
may listen on loopback alone, has other keys, and needs an engine. The token is not sent: both ends prove that they
have it (proof.py), for a nonce that the server accepts once. With TLS, the sender needs a certificate of the cluster as
well; one that has none yet is a guest, and proves the secret of the token that `orchard join` was given.
"""

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from deployments.cluster.admission import Admission, Guests, Refused
from deployments.cluster.mutual_tls import MachineTls
from deployments.cluster.proof import NONCE, PROOF, proof_of_head, proof_of_member

CHALLENGE_PATH = "/challenge"
NONCE_S = 30.0
MAX_NONCES = 256
MAX_CONNECTIONS = 16
MAX_FIELDS = 32
TIMEOUT_S = 10.0
"""Longest silence of a client."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Question:
    """A question whose sender has the token."""

    fields: Mapping[str, str]
    """Query of the path."""
    sender: str
    """Address of the sender."""


class BadQuestion(Exception):
    """The question cannot be answered; the message is for its sender."""


Answer = Callable[[Question], bytes]
"""Answers a question, in a thread of its own. Raises BadQuestion."""


class ProofServer:
    """The server.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any.
        token: Of the cluster.
        answers: Path to what answers it.
        tls: This machine's end of the connections; None: they are not encrypted.
        guests: Machines without a certificate that are answered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        answers: Mapping[str, Answer],
        tls: MachineTls | None = None,
        guests: Guests | None = None,
    ):
        """Bind the port. Raises OSError."""
        handler = _handler(Admission(token, tls, guests), answers, _Nonces())
        self._server = _Server(tls, (host, port), handler)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        """Answer in threads of its own."""
        threading.Thread(target=self._server.serve_forever, name="proofs", daemon=True).start()

    def stop(self) -> None:
        """Stop and release the port."""
        self._server.shutdown()
        self._server.server_close()


class _Nonces:
    """Nonces that were given out, each of which is accepted once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, float] = {}

    def make(self) -> str:
        """Return a nonce. Raises Refused if there are MAX_NONCES that are still valid."""
        now = time.monotonic()
        with self._lock:
            self._made = {nonce: made for nonce, made in self._made.items() if now - made < NONCE_S}
            if len(self._made) >= MAX_NONCES:
                raise Refused(503, "too many machines ask at once; try again in a minute")
            nonce = secrets.token_hex(16)
            self._made[nonce] = now
            return nonce

    def use(self, nonce: str) -> bool:
        with self._lock:
            made = self._made.pop(nonce, None)
        return made is not None and time.monotonic() - made < NONCE_S


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tls: MachineTls | None, *arguments: Any):
        self._tls = tls
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread. Raises OSError: the client is no machine of the cluster."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(TIMEOUT_S)
        with closing(self._tls.accept(request)) as encrypted:
            super().finish_request(encrypted, client_address)  # pyright: ignore[reportArgumentType]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # the client reads the end of the connection
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone."""


def _answer_to(parts: SplitResult, sender: str, answers: Mapping[str, Answer]) -> bytes:
    """Return the answer to a question whose sender may ask. Raises Refused."""
    if parts.path not in answers:
        raise Refused(404, "no such path")
    try:
        fields = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query), max_num_fields=MAX_FIELDS))
        return answers[parts.path](Question(fields, sender))
    except (BadQuestion, ValueError) as problem:
        raise Refused(400, str(problem)) from None


def _reply_to(
    request: BaseHTTPRequestHandler, admission: Admission, answers: Mapping[str, Answer], nonces: _Nonces
) -> tuple[bytes, dict[str, str]]:
    """Return the answer to a request and its headers. Raises Refused."""
    shown = {} if admission.guests is None else admission.guests.shown
    parts = urlsplit(request.path)
    if request.path == CHALLENGE_PATH:
        return json.dumps({"nonce": nonces.make()}).encode(), {}
    if parts.path in shown:
        return shown[parts.path], {}
    token = admission.secret_for(parts.path, request.connection)
    nonce, proof = request.headers.get(NONCE, ""), request.headers.get(PROOF, "")
    expected = proof_of_member(token, nonce, request.path)
    if not (nonces.use(nonce) and hmac.compare_digest(proof.encode(), expected.encode())):
        raise Refused(403, "the token is not that of this cluster")
    body = _answer_to(parts, request.client_address[0], answers)
    return body, {PROOF: proof_of_head(token, nonce, body)}


def _handler(admission: Admission, answers: Mapping[str, Answer], nonces: _Nonces) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S
        server_version, sys_version = "Orchard", ""

        def do_GET(self) -> None:
            try:
                body, headers = _reply_to(self, admission, answers, nonces)
            except Refused as refused:
                told = {"error": refused.message, "reason": refused.reason}
                self._answer(refused.status, json.dumps(told).encode())
            else:
                self._answer(200, body, headers)

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
