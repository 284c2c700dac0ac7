"""Which rows and prompts in progress are preempted: less urgent ones, or rows of clients above their fair share."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from engine.core.cost_model import CostModel
from engine.core.prefill_scheduler import PrefillScheduler
from engine.core.prompt import Prompt
from engine.core.prompt_queue import PromptQueue
from engine.core.row import Row, RowState
from engine.core.scheduler_context import SchedulerContext
from engine.core.virtual_token_counter import VirtualTokenCounter

MIN_RUN_PER_RECOMPUTE = 20.0
"""A row is not preempted for fairness before it has run for this many times the seconds of recomputing it: fairness
costs less than 5 % of the device's time."""

LATE_PART = 0.8
"""After this share of queue_timeout_s a prompt may preempt rows earlier, because it would expire soon."""

Victim = Row | Prompt
"""A decoding row, or a prompt in progress with all its rows."""

V = TypeVar("V", bound=Victim)


class Preemption:
    """Chooses rows and prompts in progress to preempt, for a queued prompt or for rows that grow.

    Nothing is chosen for a prompt unless the freed rows and bytes suffice.

    Args:
        context: Configuration, clock, cost model, memory budget, evictable memory and prefix lookup.
        queue: The queued prompts.
        running: The decoding rows by row id, in the order of joining; the scheduler's own mapping.
        prefills: The prompts in progress.
        shares: Service that each client has received so far.
    """

    def __init__(
        self,
        context: SchedulerContext,
        queue: PromptQueue,
        running: Mapping[str, Row],
        prefills: PrefillScheduler,
        shares: VirtualTokenCounter,
    ):
        self._config = context.config
        self._clock = context.clock
        self._budget = context.budget
        self._evictable = context.evictable
        self._costs = context.costs
        self._queue = queue
        self._shares = shares
        self._running = running
        self._prefills = prefills

    def choose_victims(self, head: Prompt) -> tuple[Prompt, Sequence[Victim]]:
        """Return the prompt that may preempt others, and the rows and prompts to preempt.

        None are returned to preempt if preempting them would not suffice.

        With policy `priority` the most urgent prompt preempts less urgent rows and prompts in progress. Otherwise the
        head, once it has waited for ageing_s, preempts rows of clients above their fair share.
        """
        limits, now = self._config.scheduler, self._clock()
        if limits.policy == "priority":
            urgent = self._queue.most_urgent
            return urgent, self._choose_for_priority(urgent, now)
        if limits.fairness != "off" and self._queue.waited_s(head) >= limits.ageing_s:
            return head, self._choose_for_fairness(head, now)
        return head, []

    def choose_for_growth(self) -> Victim:
        """Return the decoding row or prompt in progress that is least urgent and, among those, cheapest to recompute.

        The growing row itself may be chosen.
        """

        def price(one: Victim) -> tuple[int, float]:
            priority = _priority(one) if self._config.scheduler.policy == "priority" else 0
            return -priority, recompute_s(_rows(one)[0], self._costs)

        return min([*reversed(self._prefills.in_progress), *reversed(list(self._running.values()))], key=price)

    def _choose_for_priority(self, queued: Prompt, now: float) -> list[Victim]:
        """Choose less urgent rows and prompts, the least urgent and latest first; empty if they do not suffice."""
        in_progress = reversed(self._prefills.in_progress)
        prompts = [one for one in in_progress if self._may_preempt_prompt(one, queued, now)]
        weaker = [one for one in [*prompts, *self._unprotected(now)] if _priority(one) > queued.priority]
        return self._enough(queued, sorted(weaker, key=_priority, reverse=True))

    def _may_preempt_prompt(self, prompt: Prompt, queued: Prompt, now: float) -> bool:
        """Return whether a more urgent prompt may preempt a prompt in progress.

        A protected prompt is preempted only after its first chunk, and only by one that has waited for as long as its
        own computation takes and as recomputing the protected one takes, doubled for each earlier restart: a stream of
        urgent prompts can neither keep it from beginning nor restart it for ever.
        """
        if not prompt.is_protected:
            return True
        if not prompt.has_started:
            return False
        own_s, row = self._costs.prompt_s(0, queued.end), prompt.row
        return now - queued.arrived_s >= max(own_s, recompute_s(row, self._costs)) * 2**row.num_restarts

    def _choose_for_fairness(self, queued: Prompt, now: float) -> list[Row]:
        """Choose the latest rows of clients above their fair share, in rows or bytes, for a client below its own.

        The choice is empty if they do not suffice, or if recomputing them takes longer than `queued` has waited.
        """
        num_clients = max(self._shares.num_active, 1)
        max_rows = max(1, self._config.max_running // num_clients)
        num_rows_of, parts = Counter[str](), defaultdict[str, float](float)
        for row in self._running.values():
            num_rows_of[row.spec.client] += 1
            parts[row.spec.client] += self._budget.row_share(row)
        if num_rows_of[queued.client] + len(queued.rows) > max_rows:
            return []
        is_late = now - queued.arrived_s >= LATE_PART * self._config.scheduler.queue_timeout_s and not queued.has_output
        min_run = 1.0 if is_late else MIN_RUN_PER_RECOMPUTE
        candidates = []
        for row in self._unprotected(now):
            if now - row.joined_s < min_run * recompute_s(row, self._costs):
                continue
            client = row.spec.client
            if client != queued.client and (num_rows_of[client] > max_rows or parts[client] > 1 / num_clients):
                candidates.append(row)
                num_rows_of[client] -= 1
                parts[client] -= self._budget.row_share(row)
        victims = self._enough(queued, candidates)
        lost_s = sum(recompute_s(row, self._costs) for row in victims)
        return victims if lost_s <= now - queued.arrived_s else []

    def _unprotected(self, now: float) -> list[Row]:
        """Return the rows that may be preempted now, the latest first."""
        return [row for row in reversed(list(self._running.values())) if row.keep_until_s <= now]

    def _enough(self, queued: Prompt, candidates: Sequence[V]) -> list[V]:
        """Return the shortest prefix of the candidates that suffices; empty if all together do not."""
        num_rows, num_bytes = self._prefills.num_free_rows, self._evictable.evictable_bytes

        def suffice(num: int) -> bool:
            preempted = [row.id for one in candidates[:num] for row in _rows(one)]
            missing = self._budget.shortfall_bytes(queued.rows, preempted, queued.growth_tokens)
            return len(queued.rows) <= num_rows + len(preempted) and missing <= num_bytes

        if not suffice(len(candidates)):
            return []
        return list(candidates[: next(num for num in range(len(candidates) + 1) if suffice(num))])


def recompute_s(row: Row, costs: CostModel) -> float:
    """Predict the seconds of recomputing what was computed of a row after its cached prefix, without a new snapshot."""
    end = row.prompt.num_prefilled if row.state is RowState.PREFILL else row.num_tokens
    return costs.prompt_s(min(row.num_cached, end), end)


def _rows(victim: Victim) -> Sequence[Row]:
    return victim.rows if isinstance(victim, Prompt) else [victim]


def _priority(victim: Victim) -> int:
    """Smaller is more urgent."""
    return _rows(victim)[0].spec.priority
