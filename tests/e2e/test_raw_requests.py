"""Requests of HTTP/1.0 clients, and of clients that shut down their sending side, through a real server."""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.field_cases.test_field_cases import CASES, RAW

pytestmark = pytest.mark.server

BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "stream": True}


def raw(version: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    text = json.dumps(body)
    head = f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}"


REQUESTS = {name: (CASES[name]["request"]["raw"], bool(CASES[name]["request"].get("half_close"))) for name in RAW} | {
    "whole-answer-1.0": (raw("1.0", {**BODY, "stream": False}), False),
    "messages-1.0": (raw("1.0", BODY, "/v1/messages"), False),
    "stream-half-closed": (raw("1.1", BODY), True),
    "responses-half-closed": (
        raw("1.1", {"model": "demo", "input": "Hi", "max_output_tokens": 5}, "/v1/responses"),
        True,
    ),
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a_client_gets_its_whole_answer(http: httpx.Client, name: str):
    request, is_half_closed = REQUESTS[name]
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), 60) as connection:
        connection.sendall(request.encode())
        if is_half_closed:
            connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    while answer.startswith("HTTP/1.1 100"):
        answer = answer.partition("\r\n\r\n")[2]
    head, _, body = answer.partition("\r\n\r\n")
    assert head.split()[1] == "200", answer
    if " HTTP/1.0" in request:
        assert "transfer-encoding" not in head.lower()
    if '"stream": true' not in request:
        assert json.loads(body)["model"] == "demo"
    else:
        ends = ("data: [DONE]", "event: message_stop", "0\r\n")
        assert any(end in body[-200:] for end in ends), body[-300:]
