"""The questions of `orchard join`, which the head answers at a port of its own. The facts are no secret."""

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from deployments.cluster.proof_server import Answer, ProofServer, Question

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
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        facts: Callable[[], dict[str, Any]],
        more: Mapping[str, Answer] | None = None,
    ):
        """Bind the port. Raises OSError."""

        def tell(question: Question) -> bytes:
            return json.dumps({**facts(), "seen_address": question.sender}).encode()

        def transfer(question: Question) -> bytes:
            return secrets.token_bytes(TRANSFER_BYTES)

        super().__init__(host, port, token, {FACTS_PATH: tell, TRANSFER_PATH: transfer, **(more or {})})
