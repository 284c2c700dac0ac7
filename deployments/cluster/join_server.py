"""The questions of `orchard join`, which the head answers at a port of its own. The facts are no secret.

With TLS, they, the models' files and a certificate are given to guests as well: machines without a certificate that
have the head's token.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from deployments.cluster.issuing import SIGN_PATH
from deployments.cluster.model_files import FILES_PATH, PIECE_PATH
from deployments.cluster.mutual_tls import AUTHORITY_PATH, MachineTls
from deployments.cluster.proof_server import Answer, Guests, ProofServer, Question

FACTS_PATH, TRANSFER_PATH = "/facts", "/transfer"
TRANSFER_BYTES = 8 * 2**20


class JoinServer(ProofServer):
    """The endpoint.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any.
        token: Of the cluster.
        facts: Returns the JSON object that a joining machine needs; called once per question.
        more: Further paths, and what answers them.
        tls: This machine's end of the connections; None: they are not encrypted.
        authority: Certificate of the cluster's authority, as PEM.
        guest_secret: Returns the secret of guests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        facts: Callable[[], dict[str, Any]],
        more: Mapping[str, Answer] | None = None,
        tls: MachineTls | None = None,
        authority: str = "",
        guest_secret: Callable[[], str] | None = None,
    ):
        """Bind the port. Raises OSError."""

        def tell(question: Question) -> bytes:
            return json.dumps({**facts(), "seen_address": question.sender}).encode()

        def transfer(question: Question) -> bytes:
            return secrets.token_bytes(TRANSFER_BYTES)

        guests = None
        if guest_secret is not None:
            shown = {AUTHORITY_PATH: authority.encode()}
            paths = frozenset((FACTS_PATH, TRANSFER_PATH, FILES_PATH, PIECE_PATH, SIGN_PATH))
            guests = Guests(paths, guest_secret, shown)
        answers = {FACTS_PATH: tell, TRANSFER_PATH: transfer, **(more or {})}
        super().__init__(host, port, token, answers, tls, guests)
