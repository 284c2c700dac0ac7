"""JSON values that a request may contain."""

import json
import time

import pytest

from deployments.http.json_body import parse_json_object
from engine.errors import InvalidRequest
from engine.processing.json_shape import MAX_JSON_VALUES


def nested(depth):
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": "\xff"}', "byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b"[]", "object"),
        (b"5", "object"),
        (b"null", "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [Infinity]}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (nested(65), "64"),
        (nested(100_000), "64"),
        (b'{"a": [' + b"[]," * MAX_JSON_VALUES + b"[]]}", str(MAX_JSON_VALUES)),
        (b'{"a": [' + b"1," * MAX_JSON_VALUES + b"1]}", str(MAX_JSON_VALUES)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_no_sound_json_object_is_a_400(send, body, said):
    response = send("POST", "/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"a": "\ud800"}', "a"),
        (rb'{"a": [1, {"b": "x\uDFFF"}]}', "a[1].b"),
        (rb'{"a": {"\ud83d": 1}}', "a"),
        (rb'{"\ud83d": 1}', None),
    ],
)
def test_half_a_surrogate_pair_is_refused(body, field):
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        parse_json_object(body)
    assert caught.value.field == field


def test_sound_bodies_are_parsed_as_they_are():
    body = {
        "text": '"[{\\' * 1000 + "😀 \ud83d".replace("\ud83d", ""),
        "nested": [[[{"a": None}]]],
        "n": [1, -2.5, True],
    }
    assert parse_json_object(json.dumps(body).encode()) == body
    assert parse_json_object(json.dumps(body, ensure_ascii=False).encode()) == body
    assert parse_json_object(nested(64)) == json.loads(nested(64))
    assert parse_json_object(rb'{"a": "\\ud800"}') == {"a": r"\ud800"}


def test_brackets_within_strings_do_not_count_as_nesting_depth():
    body = {"a": ["[" * 1000, '\\"[{' * 1000]}
    assert parse_json_object(json.dumps(body).encode()) == body


def test_body_with_a_large_image_is_parsed_in_two_seconds():
    body = json.dumps({"a": ["[{" * 40, "A" * 2**24]}).encode()
    begin = time.thread_time()
    parse_json_object(body)
    assert time.thread_time() - begin < 2
