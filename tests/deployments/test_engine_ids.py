import pytest

from deployments.engine_ids import ENGINE_ID, engine_ids, node_of, number_of, routing_id, short_id


@pytest.mark.parametrize("num_engines, expected", [(1, ["4f0c"]), (3, ["4f0c:0", "4f0c:1", "4f0c:2"])])
def test_the_only_engine_of_a_node_has_its_id_and_several_have_numbers(num_engines: int, expected: list[str]):
    found = engine_ids("4f0c", num_engines)
    assert found == expected
    assert {node_of(one) for one in found} == {"4f0c"}
    assert [number_of(one) for one in found] == [str(number) for number in range(num_engines)]


def test_calls_name_an_engine_by_its_own_id_and_other_replicas_by_that_of_their_node():
    assert routing_id("4f0c", {ENGINE_ID: "4f0c:1"}) == "4f0c:1"
    assert routing_id("4f0c", {}) == "4f0c"


def test_a_short_id_keeps_the_number():
    assert (short_id("4f0c77aa", 4), short_id("4f0c77aa:12", 4)) == ("4f0c", "4f0c:12")
    assert (node_of(""), number_of("")) == ("", "0")
