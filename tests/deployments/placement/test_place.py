"""The nodes that are asked for a request, and the one that gets it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from deployments.placement.place import NodeFacts, Placement, choose, weights
from engine.placement import ConversationKeys, MovableSnapshot, Question, Quote

NODES = [NodeFacts(f"node{i}") for i in range(20)]


def question(number=1, num_tokens=1000, has_images=False) -> Question:
    keys = ConversationKeys(7, number * 0x9E3779B97F4A7C15 % 2**64)
    return Question("r", keys, num_tokens, has_images=has_images)


def placement_of(nodes=NODES) -> Placement:
    placement = Placement()
    placement.update(nodes)
    return placement


def test_two_nodes_by_the_conversation_and_the_home_of_the_system_part_are_asked():
    placement = placement_of()
    asked = [placement.candidates(question(number)) for number in range(1, 50)]
    assert {len(set(nodes)) for nodes in asked} <= {2, 3}
    home = set.intersection(*(set(nodes) for nodes in asked))
    assert len(home) == 1, "all of them have the same system part"
    assert asked == [placement_of().candidates(question(number)) for number in range(1, 50)], "every ingress asks them"


def test_last_node_of_a_conversation_is_asked_as_long_as_it_exists():
    placement = placement_of()
    other = next(node for node in placement.node_ids if node not in placement.candidates(question()))
    placement.placed(question(), other)
    assert other in placement.candidates(question()) and placement.last(question()) == other
    assert other not in placement.candidates(question(), without=[other])
    assert len(placement.candidates(question(), without=placement.candidates(question()))) >= 2
    placement.update(node for node in NODES if node.node_id != other)
    assert placement.last(question()) is None and other not in placement.candidates(question())


def test_nodes_whose_context_is_too_short_or_that_read_no_images_are_not_asked():
    small = [replace(node, max_context_tokens=8_000, reads_images=False) for node in NODES[:10]]
    large = [replace(node, max_context_tokens=100_000) for node in NODES[10:15]]
    placement = placement_of([*small, *large, *NODES[15:]])
    smalls = {node.node_id for node in small}
    for number in range(50):
        assert not smalls & set(placement.candidates(question(number, num_tokens=50_000)))
        assert not smalls & set(placement.candidates(question(number, has_images=True)))
    assert any(smalls & set(placement.candidates(question(number))) for number in range(50))
    limited = placement_of([*small, *large])
    assert limited.candidates(question(num_tokens=200_000)), "the number of tokens is an estimate"
    assert not smalls & set(limited.candidates(question(num_tokens=200_000)))


def moving(number: int, num_tokens: int = 1000, **more: Any) -> MovableSnapshot:
    key = number * 0x9E3779B97F4A7C15 % 2**64
    fields: dict[str, Any] = {"is_shared": False, "has_images": False, **more}
    return MovableSnapshot(f"{number:032x}", num_tokens, 10**6, 1.0, 0.0, key=key, **fields)


SHARING = [replace(node, snapshots=f"10.0.0.{number}:7") for number, node in enumerate(NODES)]


def test_the_successor_of_a_node_is_asked_first_once_it_has_left():
    placement = placement_of(SHARING)
    for number in range(50):
        own = placement.candidates(question(number))[0]
        left = placement_of(node for node in SHARING if node.node_id != own)
        successor = placement.successor(moving(number), {own})
        assert successor == left.candidates(question(number))[0] in placement.candidates(question(number), [own])


def test_the_successor_can_take_the_conversation_and_shares_snapshots():
    small = [replace(node, max_context_tokens=8_000) for node in SHARING[:8]]
    blind = [replace(node, reads_images=False) for node in SHARING[8:14]]
    placement = placement_of([*small, *blind, *NODES[14:18], *SHARING[18:]])
    for number in range(50):
        assert placement.successor(moving(number, 50_000, has_images=True), {"node18"}) == "node19"
    assert placement_of().successor(moving(1), set()) is None
    assert placement_of(SHARING[:1]).successor(moving(1), {"node0"}) is None


def test_nodes_that_join_together_ask_different_neighbours():
    placement = placement_of([*SHARING[:15], *NODES[15:]])
    asked = {node.node_id: placement.neighbours(node.node_id, 3) for node in SHARING[:15]}
    assert all(len(set(others)) == 3 and own not in others for own, others in asked.items())
    assert len({frozenset(others) for others in asked.values()}) > 5
    assert not {node.node_id for node in NODES[15:]} & {other for others in asked.values() for other in others}
    assert placement_of(SHARING[:2]).neighbours("node0", 3) == ["node1"]
    assert placement_of().neighbours("node0", 3) == []


CROWDED, BUSY = Quote(crowding_s=100.0), Quote(wait_s=20.0)


@pytest.mark.parametrize("quote", [CROWDED, BUSY, Quote(refusal="queue_full"), None])
def test_new_conversation_that_finds_no_place_is_offered_to_three_more_nodes(quote):
    placement = placement_of()
    asked = placement.candidates(question())
    more = placement.more(question(), dict.fromkeys(asked, quote))
    assert len(set(more)) == 3 and not set(more) & set(asked)
    assert placement.more(question(), dict.fromkeys(asked, quote) | {asked[0]: Quote()}) == []


def test_conversation_that_lives_somewhere_is_not_offered_to_more_nodes():
    placement = placement_of()
    asked = placement.candidates(question())
    assert placement.more(question(), {asked[0]: replace(BUSY, is_resident=True), asked[1]: CROWDED}) == []
    placement.placed(question(), asked[0])
    assert placement.more(question(), dict.fromkeys(asked, BUSY)) == []
    assert placement.more(question(), dict.fromkeys(asked, Quote(refusal="draining"))), "unless it must move"


CONTINUED = replace(question(), keys=replace(question().keys, turns=(3, 2)))


def test_conversation_that_another_ingress_placed_after_more_questions_is_found_again():
    placing, other = placement_of(), placement_of()
    asked = dict.fromkeys(placing.candidates(question()), CROWDED)
    home = placing.more(question(), asked)[-1]
    assert home not in other.candidates(CONTINUED)
    assert home in other.more(CONTINUED, dict.fromkeys(other.candidates(CONTINUED), Quote()))
    assert not other.more(question(), dict.fromkeys(other.candidates(question()), Quote())), "it has had no turns"
    with_system = replace(question(), keys=replace(question().keys, turns=(3, question().keys.system)))
    assert not other.more(with_system, dict.fromkeys(other.candidates(with_system), Quote())), "nor has this one"


def test_silent_node_where_a_conversation_may_live_is_asked_again():
    placement = placement_of()
    first, *others = placement.candidates(CONTINUED)
    quotes = {first: None, **dict.fromkeys(others, Quote())}
    assert placement.more(CONTINUED, quotes)[0] == first
    placement.placed(CONTINUED, first)
    assert placement.more(CONTINUED, quotes) == [first], "this ingress knows that it lives there"
    assert not placement.more(CONTINUED, {first: Quote(), others[0]: None})


def test_a_system_part_has_more_homes_among_more_nodes():
    def homes(num_nodes: int) -> set[str]:
        placement, found = placement_of([NodeFacts(f"node{i}") for i in range(num_nodes)]), Counter[str]()
        for number in range(1, 400):
            found.update(placement.candidates(question(number)))
        return {node for node, num in found.items() if num > 3 * 800 / num_nodes}

    assert [len(homes(num_nodes)) for num_nodes in (20, 100, 250)] == [1, 4, 10]


def test_all_nodes_are_asked_where_there_are_few():
    placement = placement_of(NODES[:2])
    assert sorted(placement.candidates(question())) == ["node0", "node1"]
    assert placement.more(question(), {"node0": BUSY, "node1": BUSY}) == []
    assert placement_of([]).candidates(question()) == []


def test_least_seconds_are_chosen_and_the_first_of_equal_ones():
    assert choose({"a": Quote(prefill_s=9.0), "b": Quote(wait_s=1.0, slowdown_s=1.0)}) == "b"
    assert choose({"a": Quote(prefill_s=9.0), "b": Quote(prefill_s=9.0)}) == "a"


def test_conversation_leaves_its_last_node_only_for_a_large_gain():
    assert choose({"a": Quote(wait_s=10.0), "b": Quote(wait_s=8.5)}, last="a") == "a", "15 %"
    assert choose({"a": Quote(wait_s=10.0), "b": Quote(wait_s=7.5)}, last="a") == "b"
    assert choose({"a": Quote(wait_s=0.9), "b": Quote()}, last="a") == "a", "less than a second"


def test_nodes_that_refuse_are_left_out_and_silent_ones_come_last():
    assert choose({"a": Quote(refusal="memory"), "b": None, "c": Quote(wait_s=900.0)}) == "c"
    assert choose({"a": Quote(refusal="memory"), "b": None}) == "b"
    assert choose({"a": None, "b": None}, last="b") == "b"
    assert choose({"a": Quote(refusal="memory")}) is None


def test_placement_chooses_by_the_last_node_that_it_remembers():
    placement = placement_of()
    quotes = {"node1": Quote(wait_s=8.5), "node2": Quote(wait_s=10.0)}
    assert placement.choose(question(), quotes) == "node1"
    placement.placed(question(), "node2")
    assert placement.choose(question(), quotes) == "node2"


def test_weight_needs_both_room_and_speed():
    small, usual, large = (NodeFacts(f"{room} GB", room_bytes=room, pace_s=7.0) for room in (4, 40, 400))
    by_room = weights([small, usual, large])
    assert by_room["40 GB"] == 1.0 and by_room["4 GB"] < 0.2 and 1.5 < by_room["400 GB"] < 2.0
    by_pace = weights([usual, NodeFacts("unknown"), replace(usual, node_id="fast", pace_s=3.5)])
    assert by_pace["40 GB"] < by_pace["unknown"] == 1.0 < by_pace["fast"]
    assert weights(NODES) == {node.node_id: 1.0 for node in NODES}


def test_busier_nodes_get_fewer_conversations_of_a_burst():
    placement, counts = placement_of(), Counter[str]()
    for number in range(200):
        asked = placement.candidates(question(number))
        node = placement.choose(question(number), {one: Quote(wait_s=float(counts[one])) for one in asked})
        assert node is not None
        counts[node] += 1
        placement.placed(question(number), node)
    assert max(counts.values()) <= 15, "of 10 on average"


def test_a_conversation_stays_where_it_lives_although_this_ingress_has_not_seen_it():
    placement = Placement()
    placement.update([NodeFacts(node_id) for node_id in "abc"])
    question = Question("r", ConversationKeys(1, 2, (3,)), 1000)
    here = Quote(cached_tokens=900, prefill_s=0.5, is_resident=True)
    before = Quote(cached_tokens=500, prefill_s=0.4, is_resident=True)
    assert placement.choose(question, {"a": Quote(prefill_s=0.1), "b": before, "c": here}) == "c"
    assert placement.choose(question, {"a": Quote(prefill_s=0.1), "c": Quote(wait_s=9, is_resident=True)}) == "a"
