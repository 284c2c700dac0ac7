"""Golden files: what is written is read again, and each kind of change is told in words."""

from dataclasses import replace

import pytest

from tests.golden.exchange import Exchange, exchange
from tests.golden.golden_file import differences, dumps, loads

ONE = Exchange(200, (("content-type", "application/json"), ("x-a", "1")), '{"a": {"b": [1, 2]}, "c": "x"}')
STREAM = Exchange(200, (), 'event: a\ndata: {"x": 1}\n\nevent: b\ndata: {"x": 2}\n\n')


def test_exchanges_are_read_as_they_were_written():
    odd = Exchange(400, (("x", "a: b"),), "|bar\n\\slash\n== name\n\ttab\0 ü\n\n")
    exchanges = {"one": ONE, "stream": STREAM, "odd: with a colon": odd, "empty": Exchange(0, (), "")}
    assert loads(dumps("Title.", exchanges)) == exchanges
    assert [*loads(dumps("Title.", exchanges))] == [*exchanges]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": 500}, "status 200 -> 500"),
        ({"headers": ONE.headers[:1]}, "header x-a: '1' -> None"),
        ({"headers": ONE.headers[::-1]}, "the order of headers is ['x-a', 'content-type']"),
        ({"body": ONE.body.replace("2", "3")}, "body.a.b[1]: 2 -> 3"),
        ({"body": ONE.body.replace('"c"', '"d"')}, "body.c: 'x' -> absent"),
        ({"body": ONE.body.replace("2", "2.0")}, "body.a.b[1]: 2 -> 2.0"),
        ({"body": '{"c": "x", "a": {"b": [1, 2]}}'}, "body: the order of keys is ['c', 'a']"),
        ({"body": ONE.body.replace(": ", ":")}, "body, character 5: "),
    ],
)
def test_change_is_told_in_words(change: dict, words: str):
    told = differences({"one": ONE}, {"one": replace(ONE, **change)})
    assert told and told[0].startswith(f"one: {words}"), told


def test_change_of_a_stream_names_the_event():
    changed = replace(STREAM, body=STREAM.body.replace("2", "3"))
    assert differences({"s": STREAM}, {"s": changed}) == ["s: event 1[1].x: 2 -> 3"]


def test_new_and_missing_answers_are_told_and_equal_ones_are_not():
    assert differences({"old": ONE, "same": ONE}, {"new": ONE, "same": ONE}) == [
        "old: is gone",
        "new: is new, status 200",
    ]


def test_what_is_never_the_same_is_replaced_and_the_rest_is_kept():
    body = b'{"id": "msg_0123456789abcdef01234567", "created": 1764000000, "p": -1.2345678, "n": 12, "scoring_ms": 0.8}'
    frozen = exchange(200, [("Date", "Wed, 25 Nov 2026"), ("Allow", "POST, GET")], body)
    assert frozen.headers == (("date", "<date>"), ("allow", "GET, POST"))
    assert frozen.body == '{"id": "msg_<24 hex>", "created": 1700000000, "p": 0.1, "n": 12, "scoring_ms": 1}'


def test_long_body_is_frozen_by_its_hash():
    long, other = (exchange(200, [], b"a" * 9000 + end) for end in (b"", b"b"))
    assert len(long.body) < 100 and long != other
