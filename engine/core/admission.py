"""Which queued prompt is admitted next, and which snapshots lose their memory for it. Pure."""

from collections.abc import Mapping
from math import ceil

from engine.core.prefill_scheduler import PrefillScheduler
from engine.core.prompt import USUAL_ANSWER, Prompt
from engine.core.prompt_queue import PromptQueue
from engine.core.row import Row
from engine.core.scheduler_context import SchedulerContext
from engine.timeline import Obstacle

SHORT_PART = 0.4
"""A queued prompt is admitted beside busy prefills if it takes at most this share of the shortest one's remaining
time."""

MAX_SHORT = 32
"""How many queued prompts per step are considered as shorter than the prompts in progress."""

MAX_PASSING = 8
"""How many queued prompts behind the head are considered per step when the head does not fit in memory."""

MAX_WAIT_FOR_SNAPSHOTS = 10.0
"""A prompt waits for valuable snapshots at most this many times its own prefill time; then they are evicted for it."""

EVICTION_CHECK_S, EVICTION_CHECK_BACKOFF = 0.02, 1.1
"""First interval of the check whether snapshots are evicted for a prompt, and the factor by which its wait must have
grown before the next one: ordering all snapshots takes milliseconds on the device thread."""


class Admission:
    """Chooses the next prompt and reserves its memory. The scheduler admits it.

    Args:
        context: Configuration, clock, cost model, memory budget, evictable memory and prefix lookup.
        queue: The queued prompts.
        running: The decoding rows by row id; the scheduler's own mapping.
        prefills: The prompts in progress.
    """

    def __init__(
        self,
        context: SchedulerContext,
        queue: PromptQueue,
        running: Mapping[str, Row],
        prefills: PrefillScheduler,
    ):
        self._config = context.config
        self._clock = context.clock
        self._costs = context.costs
        self._budget = context.budget
        self._evictable = context.evictable
        self._prefixes = context.prefixes
        self._queue = queue
        self._running = running
        self._prefills = prefills

    @property
    def is_idle(self) -> bool:
        """Whether no row decodes and no prompt is in progress."""
        return not self._running and not self._prefills.in_progress

    def next_queued(self) -> Prompt | None:
        """Return the next prompt to admit, or None.

        This is the head of the queue if the prompts in progress leave time in the step. Otherwise it is one of the
        first MAX_SHORT prompts: with policy `priority` the first one if it is more urgent than all prompts in
        progress, else one whose prefill is much shorter than what is left of each of them.
        """
        if not self._queue:
            return None
        if not self._prefills.in_progress or not self._prefills.fills_step:
            return self._queue.first()
        order, policy = self._queue.order()[:MAX_SHORT], self._config.scheduler.policy
        in_progress = self._prefills.in_progress
        if policy == "priority" and all(order[0].is_before(prompt) for prompt in in_progress):
            return order[0]
        limit_s = SHORT_PART * min(map(self._prefills.remaining_s, in_progress))
        chosen = next((prompt for prompt in order if self._prompt_s(prompt, limit_s) <= limit_s), None)
        if chosen is not order[0]:
            _note_obstacle(order[0], "prompts")
        return chosen

    def reserve(self, prompt: Prompt, may_wait: bool = True) -> bool:
        """Reserve memory for a prompt and its rows, evicting snapshots where that suffices.

        Args:
            prompt: The queued prompt.
            may_wait: Whether to fail instead of evicting snapshots that are worth more seconds than the prompt has
                waited.

        Returns:
            Whether the memory is reserved. False also if fewer rows are free than the prompt has.
        """
        rows, budget = prompt.rows, self._budget
        if len(rows) > self._prefills.num_free_rows:
            _note_obstacle(prompt, "rows")
            return False
        growth = prompt.growth_tokens = self._growth_tokens(self._prompt_s(prompt, 0.0), prompt.end)
        if budget.shortfall_bytes(rows, growth_tokens=growth) or budget.group_shortfall_bytes(rows, growth):
            self._prefixes.assign(prompt)
        self._evict_for_group(prompt)
        missing = budget.reserve(rows, growth)
        if not missing:
            return True
        may_evict = not may_wait or self._may_evict(prompt, missing)
        if may_evict and self._evictable.evict(missing) and not budget.reserve(rows, growth):
            return True
        self._prefixes.revoke(prompt)
        _note_obstacle(prompt, "memory")
        return False

    def choose_backfill(self, head: Prompt) -> Prompt | None:
        """Return a prompt that fits although the head does not; None without one.

        For ageing_s after the head first did not fit, any prompt that fits may pass it. After that only a prompt that
        is predicted to finish before the head can start may pass, so that the head's predicted start is not delayed
        (EASY backfilling, Lifka 1995). No prompt may pass while the head lacks free rows.
        """
        if len(head.rows) > self._prefills.num_free_rows:
            return None
        now = self._clock()
        head.blocked_s = now if head.blocked_s is None else head.blocked_s
        is_aged = now - head.blocked_s >= self._config.scheduler.ageing_s
        room_s = self._seconds_until_room(head) if is_aged else float("inf")
        for prompt in self._queue.order()[: 1 + MAX_PASSING]:
            if prompt is head or (is_aged and self._seconds_to_end(prompt) > room_s):
                continue
            if self.reserve(prompt):
                return prompt
        return None

    def _growth_tokens(self, prompt_s: float, num_prompt_tokens: int) -> int:
        """Predict the tokens that each decoding row generates until this prompt and those in progress are computed.

        A step decodes once for all rows and then prefills for at most max_stall_s, or CostModel.busy_tokens.

        Args:
            prompt_s: Predicted seconds of the prompt when it is computed alone.
            num_prompt_tokens: Tokens of the prompt.
        """
        num_rows, in_progress = len(self._running), self._prefills.in_progress
        step_s = self._costs.step_s(num_rows, self._prefills.drafts)
        token_s = self._costs.token_s(num_rows)
        if step_s is None or token_s is None:
            return 0
        config = self._config
        seconds = prompt_s + sum(map(self._prefills.remaining_s, in_progress))
        num_tokens = num_prompt_tokens + sum(one.end - one.start for one in in_progress)
        busy_tokens = self._costs.busy_tokens(config.prefill_chunk_tokens_busy)
        num_steps = max(seconds / config.scheduler.max_stall_s, num_tokens / busy_tokens)
        return ceil(num_steps * max(1.0, step_s / token_s))

    def _prompt_s(self, prompt: Prompt, limit_s: float) -> float:
        """Predict the prefill seconds of a queued prompt.

        Its cached prefix is looked up only if the prompt would exceed the limit without it.
        """
        row = prompt.rows[0]
        seconds = self._costs.prompt_s(0, row.num_tokens)
        if seconds <= limit_s:
            return seconds
        return self._costs.prompt_s(min(self._prefixes.num_cached(row), row.num_tokens), row.num_tokens)

    def _may_evict(self, prompt: Prompt, num_bytes: int) -> bool:
        """Return whether a prompt has waited for as long as recomputing the snapshots evicted for it would take.

        It waits at most MAX_WAIT_FOR_SNAPSHOTS times its own prompt's seconds, and not at all when the engine is
        otherwise idle.
        """
        if self.is_idle:
            return True
        waited_s = self._queue.waited_s(prompt)
        if waited_s >= MAX_WAIT_FOR_SNAPSHOTS * self._prompt_s(prompt, 0.0):
            return True
        if waited_s < prompt.reconsider_eviction_s:
            return False
        prompt.reconsider_eviction_s = EVICTION_CHECK_S + EVICTION_CHECK_BACKOFF * waited_s
        return self._evictable.price(num_bytes) <= waited_s

    def _evict_for_group(self, prompt: Prompt) -> None:
        """Evict snapshots so that the rows fit into an existing decode group, if that saves more time than it costs.

        Each further group reads all weights once more per step, until the answers end.
        """
        missing, token_s = self._budget.group_shortfall_bytes(prompt.rows, prompt.growth_tokens), self._costs.token_s(1)
        num_tokens = min(USUAL_ANSWER, prompt.row.num_tokens_left)
        if missing and token_s is not None and self._evictable.price(missing) < token_s * num_tokens:
            self._evictable.evict(missing)

    def _seconds_until_room(self, head: Prompt) -> float:
        """Predict when enough rows will have finished, at max_tokens each, for the head to fit.

        Returns:
            Seconds; 0 if that is unknown or never happens.
        """
        token_s = self._costs.token_s(max(len(self._running), 1))
        if token_s is None:
            return 0.0
        ends = [(token_s * row.num_tokens_left, row.id) for row in self._running.values()]
        for prompt in self._prefills.in_progress:
            prompt_s = self._prefills.remaining_s(prompt)
            ends += [(prompt_s + token_s * row.num_tokens_left, row.id) for row in prompt.rows]
        finished: list[str] = []
        for end_s, row_id in sorted(ends):
            finished.append(row_id)
            if self._budget.shortfall_bytes(head.rows, finished, head.growth_tokens) <= self._evictable.evictable_bytes:
                return end_s
        return 0.0

    def _seconds_to_end(self, prompt: Prompt) -> float:
        """Predict the seconds from a prompt's admission to the last token of its rows."""
        row, token_s = prompt.rows[0], self._costs.token_s(len(self._running) + len(prompt.rows))
        if token_s is None:
            return float("inf")
        return self._prompt_s(prompt, 0.0) + token_s * row.num_tokens_left


def _note_obstacle(prompt: Prompt, obstacle: Obstacle) -> None:
    for row in prompt.rows:
        row.record.blocked(obstacle)
