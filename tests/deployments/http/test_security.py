"""Limits on what a request may weigh, and its id."""

import asyncio
import json
import time

import httpx
import pytest

from deployments.http.security import MAX_JSON_VALUES, parse_json_object
from engine.protocol import InvalidRequest


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


def test_brackets_within_strings_are_no_depth():
    body = {"a": ["[" * 1000, '\\"[{' * 1000]}
    assert parse_json_object(json.dumps(body).encode()) == body


def test_a_large_picture_is_parsed_quickly():
    body = json.dumps({"a": ["[{" * 40, "A" * 2**24]}).encode()
    begin = time.monotonic()
    parse_json_object(body)
    assert time.monotonic() - begin < 2


def test_a_body_of_the_limit_is_read_and_one_byte_more_is_not(send, make_app):
    app = make_app(max_body_bytes=1024)
    for num_bytes, status in [(1024, 400), (1025, 413)]:
        response = send("POST", "/v1/chat/completions", app=app, content=b" " * num_bytes)
        assert response.status_code == status
    assert "1025" in response.json()["error"]["message"]
    assert "1024" in response.json()["error"]["message"]
    assert response.headers["x-request-id"]


def test_a_body_without_a_length_is_stopped_when_it_passes_the_limit(make_app):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 512
            yield b" " * 512

    async def talk():
        transport = httpx.ASGITransport(make_app(max_body_bytes=1024))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/v1/chat/completions", content=endless(), headers=headers)

    response = asyncio.run(talk())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert num_sent < 3000


def test_a_sane_request_id_of_the_client_comes_back(send):
    for request_id in ("req-1", "x" * 128):
        assert send("GET", "/health/live", headers={"X-Request-Id": request_id}).headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "é"])
def test_any_other_request_id_is_replaced(send, request_id):
    headers = {"X-Request-Id": request_id.encode("latin-1")}
    first, second = (send("GET", "/nope", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first.startswith("req_")
    assert first != second
