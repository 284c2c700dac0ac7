"""Requests for the tests of the scheduler, and the way of a row into the batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core.cost_model import CostModel
from engine.core.memory.budget import Evictable, MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.prompt import Prompt
from engine.core.row import Row, RowState
from engine.core.runner import Drafts, PrefillOutput, RowOutput
from engine.core.scheduler import Scheduler
from engine.core.scheduler_context import SchedulerContext
from engine.core.scheduler_output import Published
from engine.protocol import EngineRequest, SamplingParams
from engine.status import EngineCounters
from tests.support.clock import Clock

STOP = 2


@dataclass
class EvictableBytes:
    """Bytes that caches hold and that cannot be evicted."""

    snapshot_bytes: int = 0
    image_bytes: int = 0
    evictable_bytes: int = 0

    def evict(self, num_bytes: int) -> bool:
        return False

    def price(self, num_bytes: int) -> float:
        return float("inf")


class NoPrefixes:
    """An empty prefix cache."""

    def num_cached(self, row: Row) -> int:
        return 0

    def source_of(self, prompt: Prompt, in_progress: Iterable[Prompt]) -> Prompt | None:
        return None

    def assign(self, prompt: Prompt) -> None:
        """There is nothing to take over."""

    def revoke(self, prompt: Prompt) -> None:
        """Nothing was assigned."""


def spec(request_id: str, num_prompt: int = 4, max_tokens: int = 30, priority: int = 0, n: int = 1) -> EngineRequest:
    prompt = np.zeros(num_prompt, np.int32)
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens), (STOP,), num_choices=n, priority=priority)


def rows_of(request: EngineRequest) -> list[Row]:
    return [Row(request, index) for index in range(request.num_choices)]


def make_scheduler(
    config: EngineConfig,
    clock: Clock | None = None,
    budget: MemoryBudget | None = None,
    evictable: Evictable | None = None,
    costs: CostModel | None = None,
) -> Scheduler:
    """Make a scheduler without a prefix cache; unless a budget is given, every request costs 0 bytes."""
    evictable = evictable or EvictableBytes()
    context = SchedulerContext(
        config=config,
        clock=clock or Clock(),
        costs=costs or CostModel(),
        budget=budget or MemoryBudget(MemoryNeeds(MemoryCosts(), 0, config.memory.reserve_tokens), evictable),
        evictable=evictable,
        prefixes=NoPrefixes(),
        has_bursts=False,
    )
    return Scheduler(context, EngineCounters())


def scheduler_of(policy: str = "fifo", clock: Clock | None = None, **config: Any) -> Scheduler:
    limits: dict[str, Any] = {"max_running": 2, "prefill_chunk_tokens": 100, "prefill_chunk_tokens_busy": 20} | config
    limits["scheduler"] = {"policy": policy, **config.get("scheduler", {})}
    return make_scheduler(EngineConfig.model_validate(limits), clock)


@dataclass
class Step:
    """The scheduler's choice for a step: drops, decoding, and the first chunk of a prompt."""

    drop: list[str]
    failed: Published
    decode: bool
    prefill: Sequence[Row]
    max_prefill_tokens: int


def step_of(scheduler: Scheduler, num_draft_tokens: int = 0) -> Step:
    """Schedule a step, and free the memory of finished rows as EngineCore does."""
    before = scheduler.take_released()
    for row in before.finished:
        scheduler.budget.release(row.id)
    released = scheduler.schedule(Drafts(num_draft_tokens))
    for row in released.finished:
        scheduler.budget.release(row.id)
    prompt = scheduler.next_prompt()
    rows = [] if prompt is None else list(prompt.rows)
    drop = [*before.row_ids, *released.row_ids]
    max_tokens = 0 if prompt is None else scheduler.prefills.chunk_tokens(prompt)
    return Step(drop, released.failed, scheduler.num_decoding > 0, rows, max_tokens)


def out(*token_ids: int, **more: Any) -> RowOutput:
    return RowOutput(token_ids, **more)


def finish_prefill(scheduler: Scheduler, rows: list[Row]) -> None:
    prompt = rows[0].prompt
    scheduler.update_prefill(prompt, PrefillOutput(prompt.num_left, {row.id: out(7) for row in rows}))


def start(scheduler: Scheduler, request: EngineRequest) -> list[Row]:
    """Through the queue and its whole prefill, to rows with one token."""
    rows = rows_of(request)
    scheduler.add(rows)
    work = step_of(scheduler)
    assert list(work.prefill) == rows
    finish_prefill(scheduler, rows)
    assert all(row.state is RowState.RUNNING for row in rows)
    return rows


def admitted(scheduler: Scheduler) -> list[str]:
    """Lets all in, one after the other, each leaving at once. Returns the requests in that order."""
    order = []
    while prefill := step_of(scheduler).prefill:
        order.append(prefill[0].spec.request_id)
        finish_prefill(scheduler, list(prefill))
        scheduler.abort(order[-1])
    return order
