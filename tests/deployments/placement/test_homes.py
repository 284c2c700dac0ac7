"""The last nodes of conversations: the least recently placed one is forgotten first."""

from deployments.placement.homes import Homes


def test_least_recently_placed_conversation_is_forgotten_first():
    homes = Homes(max_homes=2)
    homes.put(1, "a")
    homes.put(2, "b")
    homes.put(1, "c")
    homes.put(3, "d")
    assert [homes.get(key) for key in (1, 2, 3)] == ["c", None, "d"]
    assert len(homes) == 2
