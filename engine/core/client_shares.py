"""What each client has had of the engine: a counter of tokens per client (Sheng et al. 2024, arXiv 2401.00588). Pure.

A client that comes back from doing nothing starts where the least served of the others is: nobody saves up for later,
and nobody pays for having been alone.
"""

from collections import Counter

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""As in the paper: a token of the answer costs about twice one of the prompt."""

MAX_IDLE_CLIENTS = 1024


class ClientShares:
    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_open: Counter[str] = Counter()  # rows that wait or run

    @property
    def num_active(self) -> int:
        return len(self._num_open)

    def served(self, client: str) -> float:
        """In weighted tokens; only differences between clients say something."""
        return self._served.get(client, 0.0)

    def opened(self, client: str, num_rows: int) -> None:
        if client not in self._num_open:
            least = min((self._served[other] for other in self._num_open), default=0.0)
            self._served[client] = max(self.served(client), least)
        self._num_open[client] += num_rows

    def closed(self, client: str) -> None:
        """One row of the client has ended. What idle clients have had is forgotten when there are too many of them."""
        self._num_open[client] -= 1
        if self._num_open[client] == 0:
            del self._num_open[client]
        if not self._num_open:
            self._served.clear()
        elif len(self._served) > len(self._num_open) + MAX_IDLE_CLIENTS:
            self._served = {other: self._served[other] for other in self._num_open}

    def charge(self, client: str, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        if client in self._num_open:
            self._served[client] += PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
