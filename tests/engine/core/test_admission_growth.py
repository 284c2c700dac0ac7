"""Rows that outgrow their reserve while a prompt is computed: their memory is left free when the prompt is admitted."""

from dataclasses import replace

import pytest

from engine.core.memory.budget import MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.row import Row, RowState
from tests.benchmarks.agents_sim import OPEN_TOKENS, short, with_room
from tests.benchmarks.sim_runner import MAC_27B, Simulation
from tests.engine.core.rows import EvictableBytes, spec
from tests.support.night import some_at_night

RESERVE_TOKENS = 4096
THINKER_TOKENS = 20_000


def thinkers_and_a_long_prompt(long_at_s: float) -> Simulation:
    """Two long answers, and a prompt of 60k for which there is memory until one of them outgrows its reserve."""
    costs = MAC_27B.costs
    thinkers = 2 * MAC_27B.row_bytes(THINKER_TOKENS + RESERVE_TOKENS)
    long = MAC_27B.row_bytes(OPEN_TOKENS + RESERVE_TOKENS) + costs.chunk(64, OPEN_TOKENS)
    sim = Simulation(MAC_27B, with_room(MAC_27B, thinkers + long + costs.layer(2, THINKER_TOKENS + RESERVE_TOKENS)))
    for i in range(2):
        sim.ask_at(0.0, short(sim, "thinker", i, THINKER_TOKENS, 12_000))
    sim.ask_at(long_at_s, short(sim, "long", 0, OPEN_TOKENS, 500))
    return sim


@pytest.mark.parametrize(
    "long_at_s", some_at_night([279.0, 282.0, 285.0, 288.0], [282.0], "one prompt that would be preempted is enough")
)
def test_a_prompt_is_not_admitted_when_growing_rows_would_soon_preempt_it(long_at_s: float):
    """Otherwise it would be preempted, and expire in the queue."""
    sim = thinkers_and_a_long_prompt(long_at_s)
    sim.run()
    assert all(ask.is_answered for ask in sim.asks) and sim.core.stats.num_preempted == 0
    assert sum(chunk.num_tokens for chunk in sim.runner.chunks) == 2 * THINKER_TOKENS + OPEN_TOKENS


def test_only_rows_that_outgrow_their_reserve_need_more_memory():
    costs = MemoryCosts(token_bytes=10, slots_step=16)
    budget = MemoryBudget(MemoryNeeds(costs, 100_000, 64), EvictableBytes())
    rows = [Row(spec(name, num_prompt=100, max_tokens=max_tokens)) for name, max_tokens in (("a", 300), ("b", 20))]
    for row in rows:
        budget.reserve([row])
        budget.release_prefill(row)
        row.state = RowState.RUNNING
    new = [Row(replace(spec("new", num_prompt=100), client="other"))]
    now = budget.reserved_bytes
    assert budget.shortfall_bytes(new, growth_tokens=60) == budget.shortfall_bytes(new) == 0
    budget.needs.limit_bytes = now + budget.costs.rows(1, 144)
    grown = [budget.shortfall_bytes(new, growth_tokens=growth) for growth in (0, 80, 150, 1000)]
    assert grown == sorted(grown) and grown[0] < grown[1] < grown[2] < grown[3]
    assert budget.shortfall_bytes(new, growth_tokens=10**6) == grown[3], "no row gives out more than max_tokens"
