"""The queue of waiting requests, ordered by policy, ageing and fairness between clients; predicts waits. Pure."""

from bisect import insort_left, insort_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from engine.config import SchedulerConfig
from engine.core.request import Request
from engine.core.virtual_token_counter import OUTPUT_WEIGHT, PROMPT_WEIGHT, VirtualTokenCounter

USUAL_ANSWER = 256
"""Assumed tokens of an answer, where only relative costs matter: fairness, grouping, eviction."""

INTERVAL_EMA_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A queued request: the rows that share its prompt."""

    rows: list[Request]
    """One row per unfinished choice; they share a prompt."""
    arrived_s: float
    """When it was queued, on the queue's clock."""
    rank: float
    """Sort key in seconds, smallest first: the time of arrival plus the policy's penalty. All entries age at the same
    rate, so that ranks need not change while they wait."""
    is_protected: bool = False
    """Whether it is protected from preemption for other requests, during prefill and for ageing_s of decoding; else two
    requests could preempt one another for ever. Set when it was preempted (`requeue`), and by the scheduler when it is
    admitted after waiting for ageing_s."""
    blocked_s: float | None = None
    """When it first was the head of the queue and did not fit; None before."""
    has_output: bool = False
    """Whether its answer has begun: it was preempted, or another engine began it or another choice of its request."""
    growth_tokens: int = 0
    """Predicted tokens that each decoding row generates until this prompt is computed, if it is admitted now."""
    reconsider_eviction_s: float = 0.0
    """Waiting time in seconds after which evicting snapshots for it is considered again."""

    priority: int = field(init=False)
    """Priority of the request; smaller is more urgent."""
    client: str = field(init=False)
    """Client of the request."""
    cost: float = field(init=False)
    """Estimated service in weighted tokens, see virtual_token_counter.py."""

    def is_before(self, other: "QueueEntry") -> bool:
        """Return whether it is more urgent than the other, and ageing has not reversed their order."""
        return self.priority < other.priority and self.rank < other.rank

    def __post_init__(self) -> None:
        row = self.rows[0]
        self.priority, self.client = row.spec.priority, row.spec.client
        answer = min(row.sampling.max_tokens - len(row.output_token_ids), USUAL_ANSWER)
        self.cost = PROMPT_WEIGHT * row.num_tokens + OUTPUT_WEIGHT * answer * len(self.rows)


Tagged = tuple[float, float, QueueEntry]
_TAG = itemgetter(0, 1)  # the client's service so far, rank


class RequestQueue:
    """Holds queued requests in the order of their ranks.

    Args:
        config: Policy, ageing, timeout and fairness.
        shares: Service that each client has received so far.
        clock: Returns monotonic seconds.
    """

    def __init__(self, config: SchedulerConfig, shares: VirtualTokenCounter, clock: Callable[[], float]):
        self._config = config
        self._shares = shares
        self._clock = clock
        self._entries: list[QueueEntry] = []  # by rank
        self._last_admitted_s: float | None = None
        self._interval_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[QueueEntry]:
        """The requests by rank. Not a copy: the caller must not change it."""
        return self._entries

    def push(self, rows: Sequence[Request]) -> None:
        """Queue a new request, given as its rows."""
        now = self._clock()
        insort_right(self._entries, QueueEntry(list(rows), now, self._rank(rows[0], now)), key=_rank_of)

    def requeue(self, rows: Sequence[Request], arrived_s: float | None = None) -> None:
        """Queue rows that were preempted, or that another engine began, before all others of the same priority.

        Args:
            rows: The rows.
            arrived_s: When the request first arrived, if it has generated no tokens; None for now.
        """
        now, priority = self._clock(), rows[0].spec.priority
        peers = [entry.rank for entry in self._entries if entry.priority == priority]
        rank = min([self._rank(rows[0], now), *peers])
        has_begun = bool(rows[0].output_token_ids or rows[0].spec.progress)
        entry = QueueEntry(list(rows), now if arrived_s is None else arrived_s, rank, True, has_output=has_begun)
        insort_left(self._entries, entry, key=_rank_of)

    def remove(self, row: Request) -> None:
        """Remove one row; its request is removed with the last of its rows."""
        entry = next(entry for entry in self._entries if row in entry.rows)
        entry.rows.remove(row)
        if not entry.rows:
            self._entries.remove(entry)

    def remove_admitted(self, entry: QueueEntry) -> None:
        """Remove an admitted request and update the mean time between admissions."""
        self._entries.remove(entry)
        now, before = self._clock(), self._last_admitted_s
        if before is not None and entry.arrived_s <= before:  # it was queued during the whole interval
            weight = 1.0 if self._interval_s is None else INTERVAL_EMA_WEIGHT
            self._interval_s = weight * (now - before) + (1 - weight) * (self._interval_s or 0.0)
        self._last_admitted_s = now

    def expired(self) -> list[QueueEntry]:
        """Return the requests that have waited longer than queue_timeout_s, except those whose answers have begun."""
        latest = self._clock() - self._config.queue_timeout_s
        return [entry for entry in self._entries if entry.arrived_s <= latest and not entry.has_output]

    def expected_wait_s(self, position: int) -> float | None:
        """Predict the wait of the request at a position (1 is the next) from recent admissions; None if unknown."""
        return None if self._interval_s is None else position * self._interval_s

    def waited_s(self, entry: QueueEntry) -> float:
        return self._clock() - entry.arrived_s

    @property
    def most_urgent(self) -> QueueEntry:
        return min(self._entries, key=lambda entry: entry.priority)

    def first(self) -> QueueEntry:
        """Return the next request to admit: the first in `order`. The queue must not be empty."""
        if not self._is_fair:
            return self._entries[0]
        priority = self._entries[0].priority
        return min((tagged for tagged in self._tagged() if tagged[2].priority == priority), key=_TAG)[2]

    def order(self) -> list[QueueEntry]:
        """Return the requests in order of admission: by rank, and within a priority by their clients' service."""
        if not self._is_fair:
            return list(self._entries)
        by_priority = dict[int, list[Tagged]]()
        for tagged in self._tagged():
            by_priority.setdefault(tagged[2].priority, []).append(tagged)
        by_tag = {priority: iter(sorted(tagged, key=_TAG)) for priority, tagged in by_priority.items()}
        return [next(by_tag[entry.priority])[2] for entry in self._entries]

    def _tagged(self) -> Iterator[Tagged]:
        """Yield (tag, rank, request) by rank.

        A client's first request has the client's service so far as its tag, the second that plus the first one's cost,
        and so on.

        A preempted request whose answer has begun comes first within its priority after ageing_s, whatever its client's
        service: new clients, with no service so far, could otherwise pass it for ever.
        """
        ahead, aged_s = dict[str, float](), self._clock() - self._config.ageing_s
        for entry in self._entries:
            tag = ahead.get(entry.client)
            tag = self._shares.served(entry.client) if tag is None else tag
            ahead[entry.client] = tag + entry.cost
            yield float("-inf") if entry.has_output and entry.arrived_s <= aged_s else tag, entry.rank, entry

    @property
    def _is_fair(self) -> bool:
        """Whether fairness applies: a single client needs none."""
        return self._config.fairness != "off" and self._shares.num_active > 1

    def _rank(self, row: Request, now: float) -> float:
        return queue_rank(self._config, now, row.num_tokens, row.spec.priority)


def queue_rank(config: SchedulerConfig, now: float, num_tokens: int, priority: int) -> float:
    """Return the rank of a request that is queued now, see QueueEntry.rank."""
    if config.policy == "shortest_first":
        return now + config.ageing_s * num_tokens / 1000
    if config.policy == "priority":
        return now + config.ageing_s * priority
    return now


def _rank_of(entry: QueueEntry) -> float:
    return entry.rank
