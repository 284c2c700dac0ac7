"""Limits on what a request may weigh, and its id."""

import asyncio

import httpx
import pytest


def test_body_one_byte_above_the_limit_is_a_413(send, make_app):
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


def test_valid_request_id_of_the_client_is_returned(send):
    for request_id in ("req-1", "x" * 128):
        assert send("GET", "/health/live", headers={"X-Request-Id": request_id}).headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "é"])
def test_malformed_request_id_of_the_client_is_replaced(send, request_id):
    headers = {"X-Request-Id": request_id.encode("latin-1")}
    first, second = (send("GET", "/nope", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first.startswith("req_")
    assert first != second
