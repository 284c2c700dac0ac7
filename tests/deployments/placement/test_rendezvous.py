"""The order of nodes for a key: equal everywhere, in proportion to weights, and changed little by joins and leaves."""

import time
from collections import Counter

import pytest

from deployments.placement.rendezvous import Rendezvous

KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(1, 4001)]


def test_order_is_the_same_whatever_the_order_of_the_nodes():
    some, others = Rendezvous({"a": 1.0, "b": 2.0, "c": 1.0}), Rendezvous({"c": 1.0, "b": 2.0, "a": 1.0})
    assert [some.ranked(key, 3) for key in KEYS[:50]] == [others.ranked(key, 3) for key in KEYS[:50]]


def test_node_is_the_first_of_a_share_of_the_keys_by_its_weight():
    rendezvous = Rendezvous({"small": 1.0, "large": 3.0, "middle": 2.0})
    firsts = Counter(rendezvous.ranked(key, 1)[0] for key in KEYS)
    assert {node: count / len(KEYS) for node, count in firsts.items()} == pytest.approx(
        {"small": 1 / 6, "middle": 2 / 6, "large": 3 / 6}, abs=0.03
    )


def test_joining_node_takes_its_share_and_changes_no_other_order():
    nodes = {f"node{i}": 1.0 for i in range(8)}
    before, after = Rendezvous(nodes), Rendezvous(nodes | {"new": 1.0})
    num_taken = 0
    for key in KEYS[:1000]:
        old, new = before.ranked(key, 8), after.ranked(key, 9)
        assert [node for node in new if node != "new"] == old
        num_taken += new[0] == "new"
    assert num_taken == pytest.approx(1000 / 9, rel=0.3)


def test_no_more_nodes_than_there_are():
    assert Rendezvous({}).ranked(1, 2) == []
    assert sorted(Rendezvous({"a": 1.0, "b": 1.0}).ranked(1, 5)) == ["a", "b"]


def test_nodes_that_are_first_for_one_key_are_ranked_by_another():
    rendezvous = Rendezvous({f"node{i}": 1.0 for i in range(50)})
    group = rendezvous.ranked(7, 5)
    order = [node for node in rendezvous.ranked(1, 50) if node in group]
    assert rendezvous.ranked_among(1, 7, 5) == order != group
    assert Rendezvous({}).ranked_among(1, 7, 5) == []


def test_choice_among_a_thousand_nodes_takes_microseconds():
    rendezvous = Rendezvous({f"{i:056x}": 1.0 for i in range(1000)})
    began_s = time.perf_counter()
    for key in KEYS[:200]:
        rendezvous.ranked(key, 2)
    assert (time.perf_counter() - began_s) / 200 < 1e-3  # 30 µs on an idle machine
