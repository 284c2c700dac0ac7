"""The requests that wait: whose turn it is by policy, ageing and client, and how long it will take. Pure."""

from bisect import insort_left, insort_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.core.client_shares import OUTPUT_WEIGHT, PROMPT_WEIGHT, ClientShares
from engine.core.request import Request

USUAL_ANSWER = 256
"""Tokens that an answer is taken to have, where it is only about the order of one client's requests among others."""

INTERVAL_EMA_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class Group:
    """Rows that share a prompt, on their way into the batch.

    rank: place in the queue, smallest first, in seconds. Waiting would lower all ranks alike, so ageing needs no
    clock: whoever comes later has a larger rank from the start. keeps_place: has waited enough to be left in peace,
    for ageing_s of decoding, when it runs. Without that two requests could take one another's place for ever.
    blocked_s: when its turn came and its memory was not free; preempted: it has run already.
    """

    rows: list[Request]
    arrived_s: float
    rank: float
    keeps_place: bool = False
    blocked_s: float | None = None
    preempted: bool = False

    @property
    def priority(self) -> int:
        return self.rows[0].spec.priority

    @property
    def client(self) -> str:
        return self.rows[0].spec.client

    @property
    def cost(self) -> float:
        row = self.rows[0]
        answer = min(row.sampling.max_tokens - len(row.output_token_ids), USUAL_ANSWER)
        return PROMPT_WEIGHT * row.num_prompt_tokens + OUTPUT_WEIGHT * answer * len(self.rows)


class RequestQueue:
    """`clock` gives monotonic seconds. shares: what the clients have had so far."""

    def __init__(self, config: SchedulerConfig, shares: ClientShares, clock: Callable[[], float]):
        self._config = config
        self._shares = shares
        self._clock = clock
        self._groups: list[Group] = []  # by rank
        self._let_in_s: float | None = None
        self._interval_s: float | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, rows: Sequence[Request]) -> None:
        now = self._clock()
        insort_right(self._groups, Group(list(rows), now, self._rank(rows[0], now)), key=_rank_of)

    def put_back(self, rows: Sequence[Request]) -> None:
        """Rows that have run, or had begun: in front of their peers."""
        now, priority = self._clock(), rows[0].spec.priority
        peers = [group.rank for group in self._groups if group.priority == priority]
        rank = min([self._rank(rows[0], now), *peers])
        insort_left(self._groups, Group(list(rows), now, rank, keeps_place=True, preempted=True), key=_rank_of)

    def remove(self, row: Request) -> None:
        group = next(group for group in self._groups if row in group.rows)
        group.rows.remove(row)
        if not group.rows:
            self._groups.remove(group)

    def let_in(self, group: Group) -> None:
        """It waits no more."""
        self._groups.remove(group)
        now, before = self._clock(), self._let_in_s
        if before is not None and group.arrived_s <= before:  # it has waited for a place all the time since
            weight = 1.0 if self._interval_s is None else INTERVAL_EMA_WEIGHT
            self._interval_s = weight * (now - before) + (1 - weight) * (self._interval_s or 0.0)
        self._let_in_s = now

    def expired(self) -> list[Group]:
        """Those that have waited for too long. Whoever has begun to answer may wait for ever."""
        latest = self._clock() - self._config.queue_timeout_s
        return [group for group in self._groups if group.arrived_s <= latest and not group.preempted]

    def expected_wait_s(self, position: int) -> float | None:
        """Of the request at this position (1 is the next), at the pace of late; None if it is not known."""
        return None if self._interval_s is None else position * self._interval_s

    def waited_s(self, group: Group) -> float:
        return self._clock() - group.arrived_s

    @property
    def most_urgent(self) -> Group:
        return min(self._groups, key=lambda group: group.priority)

    def order(self) -> list[Group]:
        """As they would be let in now: by rank, and among equals in priority those of the client that has had least.

        Of one client the first counts with what the client has had, the second with that and the first one's cost...
        """
        clients = {group.client for group in self._groups}
        if self._config.fairness == "off" or len(clients) < 2:
            return list(self._groups)
        ahead = {client: self._shares.served(client) for client in clients}
        first: dict[int, float] = {}
        tags: dict[int, float] = {}
        for group in self._groups:
            first.setdefault(group.priority, group.rank)
            tags[id(group)] = ahead[group.client]
            ahead[group.client] += group.cost
        return sorted(self._groups, key=lambda group: (first[group.priority], tags[id(group)], group.rank))

    def _rank(self, row: Request, now: float) -> float:
        policy, ageing_s = self._config.policy, self._config.ageing_s
        if policy == "shortest_first":
            return now + ageing_s * row.num_prompt_tokens / 1000
        if policy == "priority":
            return now + ageing_s * row.spec.priority
        return now


def _rank_of(group: Group) -> float:
    return group.rank
