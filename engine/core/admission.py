"""Which queued request is admitted next, and which rows or snapshots lose their memory for it. Pure."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from engine.config import EngineConfig
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.evictable import Evictable
from engine.core.memory.grouping import GroupMerge
from engine.core.memory.victims import Preemption, Victim
from engine.core.prefill_scheduler import PrefillScheduler, Prefixes
from engine.core.request import Request
from engine.core.request_queue import USUAL_ANSWER, Group, RequestQueue

SHORT_PART = 0.4
"""A queued prompt is admitted beside those in progress if it takes at most this part of the shortest one's time."""

MAX_SHORT = 32
"""How many queued requests are considered per step as shorter than the prompts in progress."""

MAX_PASSING = 8
"""How many queued requests behind the head are considered per step when the head does not fit in memory."""

PATIENCE = 10.0
"""A request waits for so many times the seconds of its prompt before valuable snapshots are evicted for it."""

MERGE_PERIOD_S = 0.5
"""How often merging decode groups is weighed."""

MIN_WEIGH_S, WEIGH_GROWTH = 0.02, 1.1
"""Evicting is weighed again when a request has waited for so many seconds, and so many times as long as the last time:
to order all snapshots takes milliseconds on the device thread."""


class Admission:
    """Chooses the next request and reserves its memory; the scheduler lets it in and preempts the rows named here.

    Args:
        queue: the requests that wait.
        running: the decoding rows by row id; the scheduler's own mapping.
        prefills: the prompts in progress.
        evictable: what may be evicted for a request.
        prefixes: what the prefix cache has for the prompts.
        preemption: chooses the rows that lose their places.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        costs: CostModel,
        budget: MemoryBudget,
        queue: RequestQueue,
        running: Mapping[str, Request],
        prefills: PrefillScheduler,
        evictable: Evictable,
        prefixes: Prefixes,
        preemption: Preemption,
    ):
        self._config = config
        self._clock = clock
        self._costs = costs
        self._budget = budget
        self._queue = queue
        self._running = running
        self._prefills = prefills
        self._evictable = evictable
        self._prefixes = prefixes
        self._preemption = preemption
        self._merge_again_s = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Whether nothing decodes and no prompt is in progress."""
        return not self._running and not self._prefills.in_progress

    @property
    def _num_free_rows(self) -> int:
        return self._config.max_running - len(self._running) - self._prefills.num_rows

    def next_entry(self) -> Group | None:
        """The head of the queue if the prompts in progress leave time in this step, else one that is much shorter."""
        if not self._queue:
            return None
        if not self._prefills.in_progress or not self._prefills.fills_step:
            return self._queue.first()
        order, policy = self._queue.order()[:MAX_SHORT], self._config.scheduler.policy
        in_progress = self._prefills.in_progress
        if policy == "priority" and all(order[0].is_before(prefill.entry) for prefill in in_progress):
            return order[0]
        limit_s = SHORT_PART * min(map(self._prefills.remaining_s, in_progress))
        return next((entry for entry in order if self._prompt_s(entry, limit_s) <= limit_s), None)

    def has_reserved(self, entry: Group, may_wait: bool = True) -> bool:
        """Reserve memory for a request's rows, evicting snapshots where that suffices.

        may_wait: not yet, if they are worth more time than the request has waited.
        """
        rows, budget = entry.rows, self._budget
        if len(rows) > self._num_free_rows:
            return False
        growth = entry.growth_tokens = self._growth_tokens(self._prompt_s(entry, 0.0), rows[0].num_prompt_tokens)
        if budget.missing(rows, growth_tokens=growth) or budget.group_shortfall_bytes(rows, growth):
            self._prefixes.promise(rows)
        self._make_room_in_group(entry)
        missing = budget.reserve(rows, growth)
        if not missing:
            return True
        may_evict = not may_wait or self._may_evict(entry, missing)
        if may_evict and self._evictable.free(missing) and not budget.reserve(rows, growth):
            return True
        self._prefixes.cancel(rows)
        return False

    def displacing(self, head: Group) -> tuple[Group, Sequence[Victim]]:
        """Return the request that may take others' places, and who loses theirs; none if that is not enough.

        Policy `priority`: the most urgent request takes those of less urgent rows and prompts in progress. Else the
        head takes, when it has waited for ageing_s, those of rows of clients that hold more than their share.
        """
        limits, now = self._config.scheduler, self._clock()
        num_rows, num_bytes = self._num_free_rows, self._evictable.free_bytes
        if limits.policy == "priority":
            urgent = self._queue.most_urgent
            in_progress = self._prefills.in_progress
            return urgent, self._preemption.for_urgent(urgent, now, num_rows, num_bytes, in_progress)
        if limits.fairness != "off" and self._queue.waited_s(head) >= limits.ageing_s:
            return head, self._preemption.for_share(head, now, num_rows, num_bytes)
        return head, []

    def passing(self, head: Group) -> Group | None:
        """A request that fits where the head does not: any for ageing_s, then those that end before the head can begin.

        EASY backfilling (Lifka 1995): the start of the head is never put off by a request that passes it. None passes
        that would take the rows that the head waits for.
        """
        if len(head.rows) > self._num_free_rows:
            return None
        now = self._clock()
        head.blocked_s = now if head.blocked_s is None else head.blocked_s
        is_aged = now - head.blocked_s >= self._config.scheduler.ageing_s
        room_s = self._seconds_until_room(head) if is_aged else float("inf")
        for entry in self._queue.order()[: 1 + MAX_PASSING]:
            if entry is head or (is_aged and self._seconds_to_end(entry) > room_s):
                continue
            if self.has_reserved(entry):
                return entry
        return None

    def merge_of_groups(self) -> GroupMerge | None:
        """Choose two decode groups that become one, if that saves more time than it takes, and book it.

        Not while requests wait, which may need the memory, nor while a prompt is in progress, to which the prefix cache
        may have promised what it still counts; and not in each step: to price snapshots takes milliseconds.
        """
        now, budget = self._clock(), self._budget
        if self._queue or self._prefills.in_progress or len(budget.grouping.groups) < 2 or now < self._merge_again_s:
            return None
        token_s, step_s = self._costs.token_s(1), self._costs.step_s(1, 0)
        if token_s is None or step_s is None:
            return None
        self._merge_again_s = now + MERGE_PERIOD_S
        for merge in budget.grouping.mergeable():
            gain_s = budget.grouping.gain_s(merge, token_s, step_s)
            if gain_s > 0 and self._has_room_for(merge, gain_s):
                budget.grouping.merge(merge)
                return merge
        return None

    def _has_room_for(self, merge: GroupMerge, gain_s: float) -> bool:
        """Whether the merge saves more time than the snapshots are worth that leave for it now or soon.

        What it takes of the free memory counts like what it lacks: the next request would have begun there.
        """
        extra, missing = self._budget.merge_bytes(merge), self._budget.merge_shortfall_bytes(merge)
        evicted = max(missing, min(extra, self._evictable.free_bytes))
        if evicted and self._evictable.price(evicted) >= gain_s:
            return False
        return not missing or (self._evictable.free(missing) and not self._budget.merge_shortfall_bytes(merge))

    def _growth_tokens(self, prompt_s: float, num_prompt_tokens: int) -> int:
        """Predict how many tokens each decoding row gives out until a prompt and those in progress are computed.

        A step decodes once for all rows and then prefills for at most max_stall_s, or prefill_chunk_tokens_busy tokens.

        Args:
            prompt_s: seconds of the prompt alone.
        """
        num_rows, in_progress = len(self._running), self._prefills.in_progress
        step_s = self._costs.step_s(num_rows, self._prefills.num_draft_tokens)
        token_s = self._costs.token_s(num_rows)
        if step_s is None or token_s is None:
            return 0
        seconds = prompt_s + sum(map(self._prefills.remaining_s, in_progress))
        num_tokens = num_prompt_tokens + sum(one.end - one.start for one in in_progress)
        config = self._config
        num_steps = max(seconds / config.scheduler.max_stall_s, num_tokens / config.prefill_chunk_tokens_busy)
        return ceil(num_steps * max(1.0, step_s / token_s))

    def _prompt_s(self, entry: Group, limit_s: float) -> float:
        """Predict the prefill time of a queued request; the prefix cache is asked if it decides about the limit."""
        row = entry.rows[0]
        seconds = self._costs.prompt_s(0, row.num_prompt_tokens)
        if seconds <= limit_s:
            return seconds
        return self._costs.prompt_s(min(self._prefixes.num_cached(row), row.num_prompt_tokens), row.num_prompt_tokens)

    def _may_evict(self, entry: Group, num_bytes: int) -> bool:
        """Whether a request has waited for as long as what would be evicted for it takes to compute again.

        It waits no longer than a few times what its own prompt takes, and not at all when nothing else runs.
        """
        if self.is_idle:
            return True
        waited_s = self._queue.waited_s(entry)
        if waited_s >= PATIENCE * self._prompt_s(entry, 0.0):
            return True
        if waited_s < entry.weigh_again_s:
            return False
        entry.weigh_again_s = MIN_WEIGH_S + WEIGH_GROWTH * waited_s
        return self._evictable.price(num_bytes) <= waited_s

    def _make_room_in_group(self, entry: Group) -> None:
        """Evict snapshots so that the rows decode among others, if that saves more time than it costs.

        In a group of their own they would read all weights once more in each step.
        """
        missing, token_s = self._budget.group_shortfall_bytes(entry.rows, entry.growth_tokens), self._costs.token_s(1)
        if missing and token_s is not None and self._evictable.price(missing) < token_s * USUAL_ANSWER:
            self._evictable.free(missing)

    def _seconds_until_room(self, head: Group) -> float:
        """Predict when enough rows will have ended, at their full length, for the head to fit.

        0 if that is not known, or if it never would.
        """
        token_s = self._costs.token_s(max(len(self._running), 1))
        if token_s is None:
            return 0.0
        ends = [(token_s * _num_tokens_left(row), row.id) for row in self._running.values()]
        for prefill in self._prefills.in_progress:
            prompt_s = self._prefills.remaining_s(prefill)
            ends += [(prompt_s + token_s * _num_tokens_left(row), row.id) for row in prefill.rows]
        leaving: list[str] = []
        for end_s, row_id in sorted(ends):
            leaving.append(row_id)
            if self._budget.missing(head.rows, leaving, head.growth_tokens) <= self._evictable.free_bytes:
                return end_s
        return 0.0

    def _seconds_to_end(self, entry: Group) -> float:
        """Predict how long a request would take from its admission to its last token."""
        row, token_s = entry.rows[0], self._costs.token_s(len(self._running) + len(entry.rows))
        if token_s is None:
            return float("inf")
        return self._prompt_s(entry, 0.0) + token_s * _num_tokens_left(row)


def _num_tokens_left(row: Request) -> int:
    """Tokens that the row may still give out."""
    return row.sampling.max_tokens - len(row.output_token_ids)
