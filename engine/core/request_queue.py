"""The requests that wait: whose turn it is by policy, ageing and client, and how long it will take. Pure."""

from bisect import insort_left, insort_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

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
    cost: in the client's tokens, about.
    blocked_s: when its turn came and there was no place for it. has_begun: to answer, before it lost its place.
    """

    rows: list[Request]
    arrived_s: float
    rank: float
    keeps_place: bool = False
    blocked_s: float | None = None
    has_begun: bool = False
    growth_tokens: int = 0
    """Tokens that each decoding row is predicted to give out before the prompt is computed, if it is admitted now."""
    weigh_again_s: float = 0.0
    """How long it must have waited before evicting snapshots for it is weighed again."""

    priority: int = field(init=False)
    client: str = field(init=False)
    cost: float = field(init=False)

    def is_before(self, other: "Group") -> bool:
        """Whether it is more urgent than the other, which has not waited long enough to make up for that."""
        return self.priority < other.priority and self.rank < other.rank

    def __post_init__(self) -> None:
        row = self.rows[0]
        self.priority, self.client = row.spec.priority, row.spec.client
        answer = min(row.sampling.max_tokens - len(row.output_token_ids), USUAL_ANSWER)
        self.cost = PROMPT_WEIGHT * row.num_prompt_tokens + OUTPUT_WEIGHT * answer * len(self.rows)


Tagged = tuple[float, float, Group]
_TAG = itemgetter(0, 1)  # what the client has had, rank


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

    def put_back(self, rows: Sequence[Request], arrived_s: float | None = None) -> None:
        """Rows that have lost their place: in front of their peers. arrived_s: of a prompt that was given up."""
        now, priority = self._clock(), rows[0].spec.priority
        peers = [group.rank for group in self._groups if group.priority == priority]
        rank, has_begun = min([self._rank(rows[0], now), *peers]), bool(rows[0].output_token_ids)
        group = Group(list(rows), now if arrived_s is None else arrived_s, rank, True, has_begun=has_begun)
        insort_left(self._groups, group, key=_rank_of)

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
        return [group for group in self._groups if group.arrived_s <= latest and not group.has_begun]

    def expected_wait_s(self, position: int) -> float | None:
        """Of the request at this position (1 is the next), at the pace of late; None if it is not known."""
        return None if self._interval_s is None else position * self._interval_s

    def waited_s(self, group: Group) -> float:
        return self._clock() - group.arrived_s

    @property
    def most_urgent(self) -> Group:
        return min(self._groups, key=lambda group: group.priority)

    def first(self) -> Group:
        """Whose turn it is: the first in `order`. The queue must not be empty."""
        if not self._is_fair:
            return self._groups[0]
        priority = self._groups[0].priority
        return min((tagged for tagged in self._tagged() if tagged[2].priority == priority), key=_TAG)[2]

    def order(self) -> list[Group]:
        """As they would be let in now: by rank, and among equals in priority by what their clients have had."""
        if not self._is_fair:
            return list(self._groups)
        by_priority = dict[int, list[Tagged]]()
        for tagged in self._tagged():
            by_priority.setdefault(tagged[2].priority, []).append(tagged)
        by_tag = {priority: iter(sorted(tagged, key=_TAG)) for priority, tagged in by_priority.items()}
        return [next(by_tag[group.priority])[2] for group in self._groups]

    def _tagged(self) -> Iterator[Tagged]:
        """By rank. Of one client the first counts with what the client has had, the second with that and the first
        one's cost...

        Whoever has begun to answer and waits for ageing_s is first among equals, whatever the client has had: others
        come anew all the time, and have had nothing.
        """
        ahead, aged_s = dict[str, float](), self._clock() - self._config.ageing_s
        for group in self._groups:
            tag = ahead.get(group.client)
            tag = self._shares.served(group.client) if tag is None else tag
            ahead[group.client] = tag + group.cost
            yield float("-inf") if group.has_begun and group.arrived_s <= aged_s else tag, group.rank, group

    @property
    def _is_fair(self) -> bool:
        """One client is in nobody's way."""
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
