"""Whose rows make room for a request that waits: less urgent ones, or those of clients with more than their share."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from engine.config import EngineConfig
from engine.core.client_shares import ClientShares
from engine.core.memory.budget import MemoryBudget
from engine.core.request import Request
from engine.core.request_queue import Group

MIN_RUN_PER_RECOMPUTE = 20.0
"""A row keeps its place, whatever its client's share is, for so many times what computing it again would take: less
than 5 % of the device's time is lost to fairness."""


LATE_PART = 0.8
"""After this part of queue_timeout_s a request may take places earlier: it would be refused soon."""


class Preemption:
    """Chooses running rows whose places a waiting request may take; none unless rows and bytes will then suffice.

    running: the scheduler's rows, in the order in which they joined. recompute_s: seconds that it would take to compute
    a row's tokens again.
    """

    def __init__(
        self,
        config: EngineConfig,
        budget: MemoryBudget,
        shares: ClientShares,
        running: Mapping[str, Request],
        recompute_s: Callable[[Request], float],
    ):
        self._config = config
        self._budget = budget
        self._shares = shares
        self._running = running
        self._recompute_s = recompute_s
        self.num_in_prefill = 0
        """Rows of prompts in progress, which the scheduler keeps up to date."""

    def has_rows(self, group: Group, num_leaving: int = 0) -> bool:
        num_rows = len(self._running) + self.num_in_prefill
        return num_rows - num_leaving + len(group.rows) <= self._config.max_running

    def for_urgent(self, group: Group, now: float, spare_bytes: int) -> list[Request]:
        """The least urgent of those that are less urgent than the group, of those the latest; none if not enough."""
        weaker = [r for r in self._unprotected(now) if r.spec.priority > group.priority]
        return self._enough(group, sorted(weaker, key=lambda row: -row.spec.priority), spare_bytes)

    def for_share(self, group: Group, now: float, spare_bytes: int) -> list[Request]:
        """Rows of clients that hold more than their share, in rows or in bytes, for one that holds less; the latest.

        None if computing them again would take longer than the request has waited.
        """
        num_clients = max(self._shares.num_active, 1)
        max_rows, held, parts = (
            max(1, self._config.max_running // num_clients),
            Counter[str](),
            defaultdict[str, float](float),
        )
        for row in self._running.values():
            held[row.spec.client] += 1
            parts[row.spec.client] += self._budget.row_share(row)
        if held[group.client] + len(group.rows) > max_rows:
            return []
        is_late = now - group.arrived_s >= LATE_PART * self._config.scheduler.queue_timeout_s and not group.has_begun
        min_run = 1.0 if is_late else MIN_RUN_PER_RECOMPUTE
        candidates = []
        for row in self._unprotected(now):
            if now - row.joined_s < min_run * self._recompute_s(row):
                continue
            client = row.spec.client
            if client != group.client and (held[client] > max_rows or parts[client] > 1 / num_clients):
                candidates.append(row)
                held[client] -= 1
                parts[client] -= self._budget.row_share(row)
        victims = self._enough(group, candidates, spare_bytes)
        return victims if sum(map(self._recompute_s, victims)) <= now - group.arrived_s else []

    def _unprotected(self, now: float) -> list[Request]:
        """The latest first."""
        return [row for row in reversed(list(self._running.values())) if row.keep_until_s <= now]

    def _enough(self, group: Group, candidates: Sequence[Request], spare_bytes: int) -> list[Request]:
        """As many of them, from the first, as it takes; spare_bytes: that others would give back for it."""
        if not self._suffice(group, [row.id for row in candidates], spare_bytes):
            return []
        ids: list[str] = []
        while not self._suffice(group, ids, spare_bytes):
            ids.append(candidates[len(ids)].id)
        return list(candidates[: len(ids)])

    def _suffice(self, group: Group, leaving: Collection[str], spare_bytes: int) -> bool:
        return self.has_rows(group, len(leaving)) and self._budget.missing(group.rows, leaving) <= spare_bytes
