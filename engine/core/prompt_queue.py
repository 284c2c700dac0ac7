"""The queue of waiting prompts, ordered by policy, ageing and fairness between clients; predicts waits. Pure."""

from bisect import insort_left, insort_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from engine.config import SchedulerConfig
from engine.core.memory.needs import MemoryNeeds
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.virtual_token_counter import VirtualTokenCounter
from engine.status import QueuedRequest

INTERVAL_EMA_WEIGHT = 0.2

MAX_SHOWN = 32
"""How many queued prompts the status page lists."""

Tagged = tuple[float, float, Prompt]
_TAG = itemgetter(0, 1)  # the client's service so far, rank


class PromptQueue:
    """Holds queued prompts in the order of their ranks.

    Args:
        config: Policy, ageing, timeout and fairness.
        shares: Service that each client has received so far.
        clock: Returns monotonic seconds.
    """

    def __init__(self, config: SchedulerConfig, shares: VirtualTokenCounter, clock: Callable[[], float]):
        self._config = config
        self._shares = shares
        self._clock = clock
        self._prompts: list[Prompt] = []  # by rank
        self._last_admitted_s: float | None = None
        self._interval_s: float | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts by rank. Not a copy: the caller must not change it."""
        return self._prompts

    def push(self, rows: Sequence[Row]) -> None:
        """Queue a new request, given as its rows."""
        now = self._clock()
        insort_right(self._prompts, Prompt(list(rows), now, self._rank(rows[0], now)), key=_rank_of)

    def requeue(self, rows: Sequence[Row], arrived_s: float | None = None) -> None:
        """Queue rows that were preempted, or that another engine began, before all others of the same priority.

        Args:
            rows: The rows.
            arrived_s: When the request first arrived, if it has generated no tokens; None for now.
        """
        now, priority = self._clock(), rows[0].spec.priority
        peers = [prompt.rank for prompt in self._prompts if prompt.priority == priority]
        rank = min([self._rank(rows[0], now), *peers])
        has_begun = bool(rows[0].output_token_ids or rows[0].spec.progress)
        prompt = Prompt(list(rows), now if arrived_s is None else arrived_s, rank, True, has_output=has_begun)
        insort_left(self._prompts, prompt, key=_rank_of)

    def remove(self, row: Row) -> None:
        """Remove one row; its prompt is removed with the last of its rows."""
        row.prompt.rows.remove(row)
        if not row.prompt.rows:
            self._prompts.remove(row.prompt)

    def remove_admitted(self, prompt: Prompt) -> None:
        """Remove an admitted prompt and update the mean time between admissions."""
        self._prompts.remove(prompt)
        now, before = self._clock(), self._last_admitted_s
        if before is not None and prompt.arrived_s <= before:  # it was queued during the whole interval
            weight = 1.0 if self._interval_s is None else INTERVAL_EMA_WEIGHT
            self._interval_s = weight * (now - before) + (1 - weight) * (self._interval_s or 0.0)
        self._last_admitted_s = now

    def expired(self) -> list[Prompt]:
        """Return the prompts that have waited longer than queue_timeout_s, except those whose answers have begun."""
        latest = self._clock() - self._config.queue_timeout_s
        return [prompt for prompt in self._prompts if prompt.arrived_s <= latest and not prompt.has_output]

    def expected_wait_s(self, position: int) -> float | None:
        """Predict the wait of the prompt at a position (1 is the next) from recent admissions; None if unknown."""
        return None if self._interval_s is None else position * self._interval_s

    def waited_s(self, prompt: Prompt) -> float:
        return self._clock() - prompt.arrived_s

    @property
    def most_urgent(self) -> Prompt:
        return min(self._prompts, key=lambda prompt: prompt.priority)

    def first(self) -> Prompt:
        """Return the next prompt to admit: the first in `order`. The queue must not be empty."""
        if not self._is_fair:
            return self._prompts[0]
        priority = self._prompts[0].priority
        return min((tagged for tagged in self._tagged() if tagged[2].priority == priority), key=_TAG)[2]

    def order(self) -> list[Prompt]:
        """Return the prompts in order of admission: by rank, and within a priority by their clients' service."""
        if not self._is_fair:
            return list(self._prompts)
        by_priority = dict[int, list[Tagged]]()
        for tagged in self._tagged():
            by_priority.setdefault(tagged[2].priority, []).append(tagged)
        by_tag = {priority: iter(sorted(tagged, key=_TAG)) for priority, tagged in by_priority.items()}
        return [next(by_tag[prompt.priority])[2] for prompt in self._prompts]

    def status(self, needs: MemoryNeeds) -> tuple[QueuedRequest, ...]:
        """Return the first MAX_SHOWN prompts in the order in which they would be admitted now, for the status page."""
        return tuple(
            QueuedRequest(
                prompt.row.spec.request_id,
                position,
                len(prompt.rows),
                needs.min_bytes(needs.need(prompt.rows)),
                self.waited_s(prompt),
                self.expected_wait_s(position),
                prompt.has_output,
            )
            for position, prompt in enumerate(self.order()[:MAX_SHOWN], 1)
        )

    def _tagged(self) -> Iterator[Tagged]:
        """Yield (tag, rank, prompt) by rank.

        A client's first prompt has the client's service so far as its tag, the second that plus the first one's cost,
        and so on.

        A preempted prompt whose answer has begun comes first within its priority after ageing_s, whatever its client's
        service: new clients, with no service so far, could otherwise pass it for ever.
        """
        ahead, aged_s = dict[str, float](), self._clock() - self._config.ageing_s
        for prompt in self._prompts:
            tag = ahead.get(prompt.client)
            tag = self._shares.served(prompt.client) if tag is None else tag
            ahead[prompt.client] = tag + prompt.cost
            yield float("-inf") if prompt.has_output and prompt.arrived_s <= aged_s else tag, prompt.rank, prompt

    @property
    def _is_fair(self) -> bool:
        """Whether fairness applies: a single client needs none."""
        return self._config.fairness != "off" and self._shares.num_active > 1

    def _rank(self, row: Row, now: float) -> float:
        return queue_rank(self._config, now, row.num_tokens, row.spec.priority)


def queue_rank(config: SchedulerConfig, now: float, num_tokens: int, priority: int) -> float:
    """Return the rank of a request that is queued now, see Prompt.rank."""
    if config.policy == "shortest_first":
        return now + config.ageing_s * num_tokens / 1000
    if config.policy == "priority":
        return now + config.ageing_s * priority
    return now


def _rank_of(prompt: Prompt) -> float:
    return prompt.rank
