"""ResponseStore: what is evicted when, and how bytes are counted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http.response_store import OVERHEAD_BYTES, ResponseStore, StoredResponse, Turn
from tests.support.clock import Clock


def turn(num_bytes: int = OVERHEAD_BYTES) -> Turn:
    return Turn(b"", b" " * (num_bytes - OVERHEAD_BYTES))


def stored(id: str, *turns: Turn, owner: str = "") -> StoredResponse:
    return StoredResponse(id, owner, turns or (turn(),))


def store(max_responses: int = 10, max_bytes: int = 10**6, ttl_s: float = 60, clock=lambda: 0.0) -> ResponseStore:
    return ResponseStore(max_responses, max_bytes, ttl_s, clock)


def kept(store: ResponseStore, *ids: str) -> list[str]:
    return [id for id in ids if store.get("", id) is not None]


def test_least_recently_used_response_is_evicted_beyond_the_maximum_number():
    small = store(max_responses=2)
    small.add(stored("a"))
    small.add(stored("b"))
    assert small.get("", "a") is not None
    small.add(stored("c"))
    assert kept(small, "a", "b", "c") == ["a", "c"]


def test_least_recently_used_response_is_evicted_beyond_the_maximum_bytes():
    small = store(max_bytes=5000)
    for id in "abc":
        small.add(stored(id, turn(2000)))
    assert kept(small, "a", "b", "c") == ["b", "c"]
    assert small.num_bytes == 4000


def test_a_response_larger_than_the_store_is_not_kept():
    small = store(max_bytes=1500)
    small.add(stored("a", turn(2000)))
    assert (len(small), small.num_bytes) == (0, 0)


def test_a_response_is_dropped_some_time_after_its_last_use():
    clock = Clock(0.0)
    timed = store(ttl_s=10, clock=clock)
    timed.add(stored("a"))
    timed.add(stored("b"))
    clock.now_s = 9.0
    assert timed.get("", "a") is not None
    clock.now_s = 11.0
    assert kept(timed, "a", "b") == ["a"]
    clock.now_s = 30.0
    assert len(timed) == 0


def test_responses_of_one_conversation_share_their_turns():
    first, second = turn(2000), turn(3000)
    shared = store()
    shared.add(stored("a", first))
    shared.add(stored("b", first, second))
    assert shared.num_bytes == 5000
    assert shared.delete("", "a")
    assert shared.num_bytes == 5000
    assert shared.delete("", "b")
    assert shared.num_bytes == 0


def test_a_response_of_another_owner_does_not_exist():
    owned = store()
    owned.add(stored("a", owner="one"))
    assert owned.get("two", "a") is None
    assert not owned.delete("two", "a")
    assert owned.get("one", "a") is not None


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.booleans()), max_size=40))
def test_stored_bytes_are_the_bytes_of_the_referenced_turns(steps):
    mixed, turns = store(max_responses=3, max_bytes=12_000), [turn(1024 * (i + 1)) for i in range(6)]
    alive: dict[str, tuple[Turn, ...]] = {}
    for id, num_turns, deletes in steps:
        if deletes:
            mixed.delete("", id)
        elif mixed.get("", id) is None:
            alive[id] = tuple(turns[: num_turns + 1])
            mixed.add(stored(id, *alive[id]))
    used = {each for id in kept(mixed, *"abcdef") for each in alive[id]}
    assert mixed.num_bytes == sum(each.num_bytes for each in used) <= 12_000
