"""What makes room for a request that waits: less urgent rows and prompts, or rows of clients above their share."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from engine.config import EngineConfig
from engine.core.client_shares import ClientShares
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.prefill import Prefill
from engine.core.request import Request, RequestState
from engine.core.request_queue import Group

MIN_RUN_PER_RECOMPUTE = 20.0
"""A row keeps its place, whatever its client's share is, for so many times what computing it again would take: less
than 5 % of the device's time is lost to fairness."""


LATE_PART = 0.8
"""After this part of queue_timeout_s a request may take places earlier: it would be refused soon."""


Victim = Request | Prefill
"""A decoding row, or a prompt in progress with all its rows."""

V = TypeVar("V", bound=Victim)


class Preemption:
    """Chooses the rows and prompts in progress whose places a waiting request may take.

    None are chosen unless rows and bytes will then suffice.

    Args:
        running: the decoding rows by row id, in the order in which they joined; the scheduler's own mapping.
        costs: predicts how long it would take to compute a row again.
    """

    def __init__(
        self,
        config: EngineConfig,
        budget: MemoryBudget,
        shares: ClientShares,
        running: Mapping[str, Request],
        costs: CostModel,
    ):
        self._config = config
        self._budget = budget
        self._shares = shares
        self._running = running
        self._costs = costs

    def for_urgent(
        self, group: Group, now: float, num_rows: int, num_bytes: int, prefills: Sequence[Prefill]
    ) -> list[Victim]:
        """The least urgent of those that are less urgent than the group, of those the latest; none if not enough.

        Args:
            num_rows: rows that are free without victims.
            num_bytes: bytes that the evictable memory would give back for the request.
            prefills: the prompts in progress.
        """
        prompts = [one for one in reversed(prefills) if self._may_give_up(one, group, now)]
        weaker = [one for one in [*prompts, *self._unprotected(now)] if _priority(one) > group.priority]
        return self._enough(group, sorted(weaker, key=_priority, reverse=True), num_rows, num_bytes)

    def _may_give_up(self, prefill: Prefill, group: Group, now: float) -> bool:
        """Whether a more urgent request may take the place of a prompt in progress.

        A prompt that keeps its place loses it to a request that has waited for as long as its own prompt takes, and as
        the other takes to compute again; each time that this one has begun from nothing, for twice as long. So it gets
        on under a stream of urgent requests, and does not begin again for ever.
        """
        if not prefill.entry.keeps_place:
            return True
        row = prefill.rows[0]
        own_s = self._costs.prompt_s(0, group.rows[0].num_prompt_tokens)
        return now - group.arrived_s >= max(own_s, recompute_s(row, self._costs)) * 2**row.num_restarts

    def for_share(self, group: Group, now: float, num_rows: int, num_bytes: int) -> list[Request]:
        """Rows of clients that hold more than their share, in rows or in bytes, for one that holds less; the latest.

        None if computing them again would take longer than the request has waited. Args: see `for_urgent`.
        """
        num_clients = max(self._shares.num_active, 1)
        max_rows = max(1, self._config.max_running // num_clients)
        held, parts = Counter[str](), defaultdict[str, float](float)
        for row in self._running.values():
            held[row.spec.client] += 1
            parts[row.spec.client] += self._budget.row_share(row)
        if held[group.client] + len(group.rows) > max_rows:
            return []
        is_late = now - group.arrived_s >= LATE_PART * self._config.scheduler.queue_timeout_s and not group.has_begun
        min_run = 1.0 if is_late else MIN_RUN_PER_RECOMPUTE
        candidates = []
        for row in self._unprotected(now):
            if now - row.joined_s < min_run * recompute_s(row, self._costs):
                continue
            client = row.spec.client
            if client != group.client and (held[client] > max_rows or parts[client] > 1 / num_clients):
                candidates.append(row)
                held[client] -= 1
                parts[client] -= self._budget.row_share(row)
        victims = self._enough(group, candidates, num_rows, num_bytes)
        lost_s = sum(recompute_s(row, self._costs) for row in victims)
        return victims if lost_s <= now - group.arrived_s else []

    def for_growth(self, prefills: Sequence[Prefill]) -> Victim:
        """The decoding row or the prompt in progress that is least urgent, and of these the one computed again soonest.

        A row that grows may be chosen itself.
        """

        def price(one: Victim) -> tuple[int, float]:
            priority = _priority(one) if self._config.scheduler.policy == "priority" else 0
            return -priority, recompute_s(_rows(one)[0], self._costs)

        return min([*reversed(prefills), *reversed(list(self._running.values()))], key=price)

    def _unprotected(self, now: float) -> list[Request]:
        """The latest first."""
        return [row for row in reversed(list(self._running.values())) if row.keep_until_s <= now]

    def _enough(self, group: Group, candidates: Sequence[V], num_rows: int, num_bytes: int) -> list[V]:
        """As many of the candidates, from the first, as it takes; none if all are not enough."""

        def suffice(num: int) -> bool:
            leaving = [row.id for one in candidates[:num] for row in _rows(one)]
            return len(group.rows) <= num_rows + len(leaving) and self._missing(group, leaving) <= num_bytes

        if not suffice(len(candidates)):
            return []
        return list(candidates[: next(num for num in range(len(candidates) + 1) if suffice(num))])

    def _missing(self, group: Group, leaving: Sequence[str]) -> int:
        return self._budget.missing(group.rows, leaving, group.growth_tokens)


def recompute_s(row: Request, costs: CostModel) -> float:
    """Predict how long it would take to compute again what has been computed of a row."""
    end = row.num_prefilled if row.state is RequestState.PREFILL else row.num_prompt_tokens
    return costs.prompt_s(min(row.num_cached, end), end)


def _rows(victim: Victim) -> Sequence[Request]:
    return victim.rows if isinstance(victim, Prefill) else [victim]


def _priority(victim: Victim) -> int:
    """Smaller is more urgent."""
    return _rows(victim)[0].spec.priority
