"""The simulation of agents in a small form: it runs with every load, and the policy does not get worse."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.benchmarks.agents_sim import LOADS, Circle, Clients, Head, Load, Priorities, Together, figures, run
from tests.benchmarks.sim_runner import H200_27B, MAC_4B, MAC_27B, MACHINES, Ask, Simulation

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")

SMALL: dict[str, Load] = {name: replace(load, turns=2) for name, load in LOADS.items()} | {
    "clients": Clients(answer_tokens=4_000),
    "head": Head(answer_tokens=6_000),
    "priorities": Priorities(turns=2, low_tokens=6_000, high_tokens=4_000),
}

MACHINE = MAC_27B

BASELINE: dict[str, dict[str, float]] = {name: {} for name in SMALL} | {
    "circle": {"computed_per_new": 0.8, "lost_s": 1.0},
    "agents4": {"computed_per_new": 0.8, "lost_s": 1.0},
    "agents8": {"computed_per_new": 0.8, "lost_s": 1.0},
    "side": {"ttft_p99_s.side": 2.4},
    "burst": {"ttft_p99_s.burst": 7.4, "elapsed_s": 25.0},
    "clients": {"again_percent": 1.0, "ttft_p99_s.small": 1.7},
    "head": {"ttft_p99_s.small": 2.1},
    "priorities": {"ttft_p99_s.urgent": 3.8},
    "slow_chunk": {"own.chunks_to_recover": 5.0},
}
"""By load and figure: what the policy reaches on MACHINE, where smaller is better."""

TOLERANCE = 1.1
"""A figure of more than so many times its baseline fails."""

ALWAYS_ZERO = (
    "num_unended", "num_failed", "num_running", "num_underestimates", "unaccounted_bytes", "leaked_bytes",
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_load_comes_to_an_end_and_its_figures_are_within_the_baseline(name):
    found = figures(MACHINE, SMALL[name])
    assert found["elapsed_s"] > 0 and found["tokens_per_s"] > 0
    assert {figure: found[figure] for figure in ALWAYS_ZERO} == dict.fromkeys(ALWAYS_ZERO, 0)
    for figure, limit in BASELINE[name].items():
        assert found[figure] <= TOLERANCE * limit, figure


def test_conversations_that_memory_does_not_hold_are_read_back_from_disk():
    with_disk, without = (figures(MAC_4B, Circle(turns=3, has_disk=has_disk)) for has_disk in (True, False))
    assert with_disk["computed_per_new"] <= TOLERANCE * 0.8 < 5 < without["computed_per_new"]
    assert {figure: with_disk[figure] for figure in ALWAYS_ZERO} == dict.fromkeys(ALWAYS_ZERO, 0)


@pytest.mark.parametrize("name", MACHINES)
def test_machine_answers_two_agents(name):
    found = figures(MACHINES[name], Together(turns=1, num_agents=2))
    assert found["num_unanswered"] == found["num_unended"] == 0
    assert found["longest_step_s"] < 120, "the watchdog's default"


def test_two_runs_give_the_same_figures():
    first, second = (figures(H200_27B, SMALL["agents4"]) for _ in range(2))
    del first["cpu_s"], second["cpu_s"]
    assert first == second


def test_turn_of_an_agent_begins_with_its_previous_prompt_and_answer():
    sim = run(H200_27B, Together(turns=3, num_agents=1))
    turns = sorted(sim.asks, key=lambda ask: ask.turn)
    assert [len(ask.token_ids) for ask in turns] == [60_000, 62_500, 65_000]
    for before, after in itertools.pairwise(turns):
        assert before.output == before.answer
        history = [*before.token_ids, *before.output]
        assert np.array_equal(after.token_ids[: len(history)], history)


def test_agent_alone_computes_only_the_new_tokens_of_each_turn():
    found = figures(H200_27B, Circle(turns=3, num_agents=1))
    assert found["computed_per_new"] == pytest.approx(2000 / 2500, abs=0.01), "the answer's 500 tokens are kept"
    assert found["lost_s"] < 0.1, "of the generation prompt"


def test_chunk_takes_longer_behind_more_tokens_and_a_step_with_more_rows():
    assert MAC_27B.chunk_seconds(50_000, 256) > MAC_27B.chunk_seconds(0, 256)
    assert MAC_27B.prompt_seconds(60_000) == pytest.approx(240, rel=0.05)
    assert MAC_27B.step_seconds([(4, 60_000)], 0) == pytest.approx(0.077, rel=0.05)
    assert MAC_27B.step_seconds([(2, 60_000), (2, 60_000)], 0) > MAC_27B.step_seconds([(4, 60_000)], 0)


def test_expired_request_is_sent_again_only_as_often_as_its_client_retries():
    sim = Simulation(MAC_27B, {"scheduler": {"queue_timeout_s": 10}})
    answer = sim.tokens(10).tolist()
    first = Ask("first", "a", sim.tokens(30_000), answer)
    patient, impatient = (Ask("late", f"{n}", sim.tokens(25_000), answer, retries=n) for n in (20, 1))
    for at_s, ask in ((0.0, first), (1.0, patient), (1.0, impatient)):
        sim.ask_at(at_s, ask)
    sim.run()
    assert patient.is_answered and patient.retries < 20 and patient.arrived_s == 1.0
    assert not impatient.is_answered and math.isnan(impatient.first_s)


def test_aborted_request_frees_its_memory_within_two_seconds():
    sim = Simulation(MAC_27B, {})
    ask = Ask("thinker", "a", sim.tokens(1_000), sim.tokens(30_000).tolist())
    sim.ask_at(0.0, ask)
    sim.at(60.0, lambda: sim.abort(ask))
    sim.run()
    assert 60 <= sim.clock.now_s < 62 and 0 < len(ask.output) < 30_000
    assert sim.runner.active_bytes == MAC_27B.costs.base_bytes + sim.core.budget.status()["prefix_cache_bytes"]
