"""The simulation of several engines in a small form: agents stay with their snapshots, and share the nodes."""

import pytest

from tests.benchmarks.nodes_sim import ARMS, Scenario, figures, seeds_of
from tests.benchmarks.sim_runner import H200_27B, MAC_27B

SMALL = Scenario((H200_27B,) * 2, num_agents=4, turns=3)


@pytest.mark.parametrize("arm", ARMS)
def test_all_agents_get_all_answers(arm):
    found = figures(SMALL, arm, seed=0)
    assert found["num_unanswered"] == 0 and sum(found["placed"].values()) == 4 * 3


def test_placement_by_quotes_keeps_agents_where_their_snapshots_are_and_shares_the_nodes():
    found = figures(SMALL, "quotes", seed=0)
    assert found["num_moved"] == 0 and found["computed_per_new"] == pytest.approx(0.8, abs=0.05)
    assert found["placed"] == {"node0": 6, "node1": 6}
    assert found["messages"] <= 6


@pytest.mark.night("it takes half a minute")
def test_quotes_answer_more_turns_than_the_fewest_calls():
    scenario = Scenario((MAC_27B,) * 2, num_agents=8, turns=6)
    quotes, calls = (figures(scenario, arm, seed=0)["turns_per_h"] for arm in ("quotes", "calls"))
    assert quotes > 1.2 * calls


def test_two_runs_give_the_same_figures():
    first, second = (figures(SMALL, "quotes", seed=1) for _ in range(2))
    del first["cpu_s"], second["cpu_s"]
    assert first == second


def test_seeds_are_given_as_one_number_or_a_range():
    assert seeds_of("3") == [3] and seeds_of("10-12") == [10, 11, 12]
