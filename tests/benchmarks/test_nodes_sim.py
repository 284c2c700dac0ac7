"""The simulation of several engines in a small form: agents stay with their snapshots, and share the nodes."""

import pytest

from tests.benchmarks.nodes_sim import ARMS, UNLIKE, Scenario, figures, seeds_of
from tests.benchmarks.sim_runner import H200_27B, MAC_27B
from tests.benchmarks.simple_nodes.cluster import FAULTS
from tests.benchmarks.simple_nodes.figures import figures as simple_figures
from tests.benchmarks.simple_nodes.placement_timing import COLUMNS, timing

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


@pytest.mark.parametrize("fault", FAULTS)
def test_all_requests_to_simple_nodes_are_answered(fault):
    found = simple_figures((MAC_27B,) * 4, "mix", fault, seed=0)
    assert found["num_unanswered"] == 0 and found["num_requests"] > 100
    assert found["cached"] > 0.8 and found["messages"] <= 6


def test_conversations_stay_at_simple_nodes_although_each_turn_comes_to_another_ingress():
    found = simple_figures((MAC_27B,) * 10, "agents", "", seed=0)
    assert found["num_moved"] == 0 and found["cached_later"] == pytest.approx(1.0)


def test_two_runs_of_simple_nodes_give_the_same_figures():
    first, second = (simple_figures(tuple(UNLIKE), "chats", "", seed=1) for _ in range(2))
    del first["cpu_s"], second["cpu_s"]
    assert first.pop("cached_later") != second.pop("cached_later"), "nan: chats have no later turns"
    assert first == second


def test_placement_is_timed_for_a_request():
    assert len(timing(3)) == len(COLUMNS)


def test_seeds_are_given_as_one_number_or_a_range():
    assert seeds_of("3") == [3] and seeds_of("10-12") == [10, 11, 12]
