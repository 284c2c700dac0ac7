"""The service each client has received: a virtual token counter (Sheng et al. 2024, arXiv 2401.00588). Pure.

A client that becomes active starts with at least the smallest counter of the active clients: idle time earns no
credit, and tokens received while no other client was active are not held against a client.
"""

from collections import Counter

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""As in the paper: an output token costs about twice a prompt token."""

MAX_IDLE_CLIENTS = 1024


class VirtualTokenCounter:
    """Counts weighted tokens per client."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_open: Counter[str] = Counter()  # rows that wait or run

    @property
    def num_active(self) -> int:
        return len(self._num_open)

    def served(self, client: str) -> float:
        """Return the weighted tokens of a client; only differences between clients are meaningful."""
        return self._served.get(client, 0.0)

    def opened(self, client: str, num_rows: int) -> None:
        """Record that rows of a client were queued."""
        if client not in self._num_open:
            least = min((self._served[other] for other in self._num_open), default=0.0)
            self._served[client] = max(self.served(client), least)
        self._num_open[client] += num_rows

    def closed(self, client: str) -> None:
        """Record that one row of a client has finished.

        Counters of idle clients are dropped when there are too many.
        """
        self._num_open[client] -= 1
        if self._num_open[client] == 0:
            del self._num_open[client]
        if not self._num_open:
            self._served.clear()
        elif len(self._served) > len(self._num_open) + MAX_IDLE_CLIENTS:
            self._served = {other: self._served[other] for other in self._num_open}

    def charge(self, client: str, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Add tokens to a client's counter."""
        if client in self._num_open:
            self._served[client] += PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
