"""Expectations are those of the command's page at https://redis.io/docs/latest/commands/."""

import pytest

from deployments.cluster.hash_store import HashStore
from deployments.cluster.resp import CommandFailed, Status


def run(store: HashStore, line: str) -> object:
    return store.run([word.encode() for word in line.split()])


def test_ping_answers_pong_or_its_argument():
    assert run(HashStore(), "PING") == Status(b"PONG")
    assert run(HashStore(), "ping hello") == b"hello"


def test_info_describes_a_server_that_is_no_sentinel():
    assert run(HashStore(), "INFO SENTINEL") == b""
    assert b"redis_mode:standalone" in bytes(HashStore().run([b"INFO"]))  # type: ignore[arg-type]


def test_hset_returns_the_number_of_added_fields_and_overwrites():
    store = HashStore()
    assert run(store, "HSET h a 1 b 2") == 2
    assert run(store, "HSET h a 3 c 4") == 1
    assert run(store, "HGET h a") == b"3"


def test_hsetnx_sets_a_field_once():
    store = HashStore()
    assert run(store, "HSETNX h a 1") == 1
    assert run(store, "HSETNX h a 2") == 0
    assert run(store, "HGET h a") == b"1"


def test_hget_and_hmget_return_nil_for_what_does_not_exist():
    store = HashStore()
    run(store, "HSET h a 1")
    assert run(store, "HGET h b") is None and run(store, "HGET other a") is None
    assert run(store, "HMGET h a b a") == [b"1", None, b"1"]
    assert run(store, "HMGET other a b") == [None, None]


def test_hexists_tells_whether_a_field_is_set():
    store = HashStore()
    run(store, "HSET h a 1")
    assert [run(store, f"HEXISTS {what}") for what in ("h a", "h b", "other a")] == [1, 0, 0]


def test_hdel_returns_the_number_of_removed_fields_and_an_empty_hash_is_no_key():
    store = HashStore()
    run(store, "HSET h a 1 b 2")
    assert run(store, "HDEL h a a x") == 1
    assert run(store, "HDEL h b") == 1
    assert run(store, "DEL h") == 0 and store.num_bytes == 0


@pytest.mark.parametrize("name", ["DEL", "UNLINK"])
def test_del_returns_the_number_of_removed_keys(name: str):
    store = HashStore()
    run(store, "HSET h a 1")
    run(store, "INCRBY n 1")
    assert run(store, f"{name} h n other") == 2 and store.num_bytes == 0


def test_incrby_starts_at_zero_and_stays_within_64_bits():
    store = HashStore()
    assert [run(store, f"INCRBY n {step}") for step in (5, -7, 0)] == [5, -2, -2]
    run(store, f"INCRBY big {2**63 - 1}")
    with pytest.raises(CommandFailed, match="ERR increment or decrement would overflow"):
        run(store, "INCRBY big 1")
    for step in ("1.5", "", "x", str(2**63)):
        with pytest.raises(CommandFailed, match="ERR value is not an integer or out of range"):
            store.run([b"INCRBY", b"n", step.encode()])


def test_hscan_returns_cursor_zero_and_all_fields_that_match():
    store = HashStore()
    run(store, "HSET h one 1 two 2 three 3")
    assert run(store, "HSCAN h 0") == [b"0", [b"one", b"1", b"two", b"2", b"three", b"3"]]
    assert run(store, "HSCAN h 0 MATCH t* COUNT 1") == [b"0", [b"two", b"2", b"three", b"3"]]
    assert run(store, "hscan other 0 count 10") == [b"0", []]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"h?llo", ["hello", "hallo"]),
        (r"h*llo", ["hello", "hallo", "hllo", "heeeello"]),
        (r"h[ae]llo", ["hello", "hallo"]),
        (r"h[^e]llo", ["hallo"]),
        (r"h[a-b]llo", ["hallo"]),
        (r"h\*llo", []),
        (r"hello", ["hello"]),
        (r"a\?b", ["a?b"]),
        (r"a.b", []),
    ],
)
def test_hscan_matches_patterns_like_redis(pattern: str, matched: list[str]):
    store = HashStore()
    for field in ("hello", "hallo", "hllo", "heeeello", "a?b"):
        run(store, f"HSET h {field} 1")
    reply = run(store, f"HSCAN h 0 MATCH {pattern}")
    assert isinstance(reply, list) and reply[1][::2] == [field.encode() for field in matched]


@pytest.mark.parametrize("line", ["HSCAN h x", "HSCAN h 0 MATCH", "HSCAN h 0 LIMIT 3", "HSCAN h 0 COUNT 0"])
def test_hscan_refuses_what_is_no_cursor_or_option(line: str):
    with pytest.raises(CommandFailed, match=r"ERR (invalid cursor|syntax error)"):
        run(HashStore(), line)


def test_a_key_of_the_other_kind_is_refused():
    store = HashStore()
    run(store, "HSET h a 1")
    run(store, "INCRBY n 1")
    for line in ("INCRBY h 1", "HGET n a", "HSET n a 1", "HSETNX n a 1", "HMGET n a", "HDEL n a", "HSCAN n 0"):
        with pytest.raises(CommandFailed, match=r"^WRONGTYPE"):
            run(store, line)


def test_unknown_commands_and_wrong_numbers_of_arguments_are_named():
    with pytest.raises(CommandFailed, match="ERR unknown command 'FLUSHALL'"):
        run(HashStore(), "FLUSHALL")
    for line in ("HGET h", "HGET h a b", "HSET h a", "HSET h a 1 b", "DEL", "INCRBY n", "PING a b"):
        with pytest.raises(CommandFailed, match=f"ERR wrong number of arguments for '{line.split()[0].lower()}'"):
            run(HashStore(), line)


def test_commands_make_an_equal_store():
    store = HashStore()
    for i in range(600):
        run(store, f"HSET h field{i} {i}")
    for line in ("HSET small a 1", "INCRBY n 7", "INCRBY n -9", "HSET gone a 1", "DEL gone"):
        run(store, line)
    again = HashStore()
    for words in store.commands():
        again.run(words)
    assert run(again, "HSCAN h 0") == run(store, "HSCAN h 0")
    assert run(again, "INCRBY n 0") == -2 and again.num_bytes == store.num_bytes
