"""The queue of waiting requests, ordered by policy, ageing and fairness between clients; predicts waiting times.
Pure."""

from bisect import insort_left, insort_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from engine.config import SchedulerConfig
from engine.core.client_shares import OUTPUT_WEIGHT, PROMPT_WEIGHT, ClientShares
from engine.core.request import Request

USUAL_ANSWER = 256
"""Assumed tokens of an answer, where only relative costs matter: fairness, grouping, eviction."""

INTERVAL_EMA_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class Group:
    """A queued request: the rows that share its prompt."""

    rows: list[Request]
    """One row per unfinished choice; they share a prompt."""
    arrived_s: float
    """When it was queued, on the queue's clock."""
    rank: float
    """Sort key in seconds, smallest first. Waiting would lower all ranks alike, so ageing needs no clock: later
    arrivals begin with larger ranks."""
    keeps_place: bool = False
    """Whether it is protected from preemption for ageing_s of decoding once it runs; else two requests could preempt
    one another for ever."""
    blocked_s: float | None = None
    """When it first was the head of the queue and did not fit; None before."""
    has_begun: bool = False
    """Whether it was preempted after it had generated tokens."""
    growth_tokens: int = 0
    """Predicted tokens that each decoding row generates until this prompt is computed, if it is admitted now."""
    weigh_again_s: float = 0.0
    """Waiting time in seconds after which evicting snapshots for it is considered again."""

    priority: int = field(init=False)
    """Priority of the request; smaller is more urgent."""
    client: str = field(init=False)
    """Client of the request."""
    cost: float = field(init=False)
    """Estimated service in weighted tokens, see client_shares.py."""

    def is_before(self, other: "Group") -> bool:
        """Return whether it is more urgent than the other, and ageing has not reversed their order."""
        return self.priority < other.priority and self.rank < other.rank

    def __post_init__(self) -> None:
        row = self.rows[0]
        self.priority, self.client = row.spec.priority, row.spec.client
        answer = min(row.sampling.max_tokens - len(row.output_token_ids), USUAL_ANSWER)
        self.cost = PROMPT_WEIGHT * row.num_prompt_tokens + OUTPUT_WEIGHT * answer * len(self.rows)


Tagged = tuple[float, float, Group]
_TAG = itemgetter(0, 1)  # the client's service so far, rank


class RequestQueue:
    """Holds queued requests in the order of their ranks.

    Args:
        config: Policy, ageing, timeout and fairness.
        shares: Service that each client has received so far.
        clock: Returns monotonic seconds.
    """

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
        """Queue a new request, given as its rows."""
        now = self._clock()
        insort_right(self._groups, Group(list(rows), now, self._rank(rows[0], now)), key=_rank_of)

    def put_back(self, rows: Sequence[Request], arrived_s: float | None = None) -> None:
        """Requeue preempted rows before all others of the same priority.

        Args:
            rows: The rows.
            arrived_s: When the request first arrived, if it has generated no tokens; None restarts its waiting time.
        """
        now, priority = self._clock(), rows[0].spec.priority
        peers = [group.rank for group in self._groups if group.priority == priority]
        rank, has_begun = min([self._rank(rows[0], now), *peers]), bool(rows[0].output_token_ids)
        group = Group(list(rows), now if arrived_s is None else arrived_s, rank, True, has_begun=has_begun)
        insort_left(self._groups, group, key=_rank_of)

    def remove(self, row: Request) -> None:
        """Remove one row; its request is removed with the last of its rows."""
        group = next(group for group in self._groups if row in group.rows)
        group.rows.remove(row)
        if not group.rows:
            self._groups.remove(group)

    def let_in(self, group: Group) -> None:
        """Remove an admitted request and update the mean time between admissions."""
        self._groups.remove(group)
        now, before = self._clock(), self._let_in_s
        if before is not None and group.arrived_s <= before:  # it was queued during the whole interval
            weight = 1.0 if self._interval_s is None else INTERVAL_EMA_WEIGHT
            self._interval_s = weight * (now - before) + (1 - weight) * (self._interval_s or 0.0)
        self._let_in_s = now

    def expired(self) -> list[Group]:
        """Return the requests that have waited longer than queue_timeout_s; requests with generated tokens never
        expire."""
        latest = self._clock() - self._config.queue_timeout_s
        return [group for group in self._groups if group.arrived_s <= latest and not group.has_begun]

    def expected_wait_s(self, position: int) -> float | None:
        """Predict the wait of the request at a position (1 is the next) from recent admissions; None if unknown."""
        return None if self._interval_s is None else position * self._interval_s

    def waited_s(self, group: Group) -> float:
        return self._clock() - group.arrived_s

    @property
    def most_urgent(self) -> Group:
        return min(self._groups, key=lambda group: group.priority)

    def first(self) -> Group:
        """Return the next request to admit: the first in `order`. The queue must not be empty."""
        if not self._is_fair:
            return self._groups[0]
        priority = self._groups[0].priority
        return min((tagged for tagged in self._tagged() if tagged[2].priority == priority), key=_TAG)[2]

    def order(self) -> list[Group]:
        """Return the requests in the order of admission: by rank, and within a priority by the clients' service so
        far."""
        if not self._is_fair:
            return list(self._groups)
        by_priority = dict[int, list[Tagged]]()
        for tagged in self._tagged():
            by_priority.setdefault(tagged[2].priority, []).append(tagged)
        by_tag = {priority: iter(sorted(tagged, key=_TAG)) for priority, tagged in by_priority.items()}
        return [next(by_tag[group.priority])[2] for group in self._groups]

    def _tagged(self) -> Iterator[Tagged]:
        """Yield (tag, rank, request) by rank. A client's first request has the client's service so far as its tag, the
        second that plus the first one's cost, and so on.

        A preempted request with generated tokens comes first within its priority after ageing_s, whatever its client's
        service:
        new clients, with no service so far, could otherwise pass it for ever.
        """
        ahead, aged_s = dict[str, float](), self._clock() - self._config.ageing_s
        for group in self._groups:
            tag = ahead.get(group.client)
            tag = self._shares.served(group.client) if tag is None else tag
            ahead[group.client] = tag + group.cost
            yield float("-inf") if group.has_begun and group.arrived_s <= aged_s else tag, group.rank, group

    @property
    def _is_fair(self) -> bool:
        """Whether fairness applies: a single client needs none."""
        return self._config.fairness != "off" and self._shares.num_active > 1

    def _rank(self, row: Request, now: float) -> float:
        policy, ageing_s = self._config.policy, self._config.ageing_s
        if policy == "shortest_first":
            return now + ageing_s * row.num_prompt_tokens / 1000
        if policy == "priority":
            return now + ageing_s * row.spec.priority
        return now


def _rank_of(group: Group) -> float:
    return group.rank
