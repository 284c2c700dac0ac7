"""Requests that are refused before any work, and cancellation by id."""

import asyncio
from urllib.parse import quote

import httpx
import pytest

from deployments.http.in_flight import InFlight
from engine.errors import Unavailable


def test_request_without_an_available_engine_is_a_503_with_the_reason(chat, backend, make_app):
    app = make_app()
    assert chat(app=app).status_code == 200
    backend.start_script = [Unavailable("No engine accepted the request within 30 s.", 7.0)]
    for unready in (None, "The weights are loading: 40 %."):
        backend.unready = unready
        response = chat(app=app)
        error = response.json()["error"]
        assert (response.status_code, error["code"], response.headers["retry-after"]) == (503, "unavailable", "7")
        assert "within 30 s" in error["message"] and (unready or "") in error["message"]


def test_requests_are_refused_at_once_while_the_first_engine_loads_its_model(chat, backend, make_app):
    app = make_app()
    backend.unready, backend.start_script = (
        "The weights are loading: 40 %.",
        [asyncio.Event()],
    )  # it would wait for ever
    for stream in (False, True):
        response = chat(app=app, stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert int(response.headers["retry-after"]) >= 1
    assert backend.requests == []
    backend.unready, backend.start_script = None, []
    assert chat(app=app).status_code == 200


def test_full_server_refuses_requests_before_parsing_them(send, chat, backend):
    backend.capacity = 0
    for response in (chat(), chat(stream=True), send("POST", "/v1/chat/completions", content=b"no JSON")):
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
    assert backend.requests == []
    assert backend.in_flight.status()["num_refused"] == 3


def test_request_for_more_choices_than_the_free_capacity_is_refused(chat, backend):
    backend.capacity = 3
    assert chat(n=4).status_code == 429
    assert backend.requests == []
    assert chat().status_code == 200
    assert (chat(n=200).status_code, chat(n=128).status_code) == (400, 429)


def test_more_choices_than_an_engine_can_run_are_a_400(chat, backend):
    backend.in_flight = InFlight(lambda: backend.capacity, max_choices=8)
    error = chat(n=9).json()["error"]
    assert (error["param"], error["type"]) == ("n", "invalid_request_error")
    assert "n is 9" in error["message"] and "8" in error["message"]
    assert backend.requests == []


def test_draining_server_refuses_generation_but_lists_models(chat, send, backend):
    asyncio.run(backend.in_flight.drain(0))
    response = chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert backend.requests == []
    assert send("GET", "/v1/models").status_code == 200


@pytest.mark.parametrize("request_id", ["mine", "a/b/cancel", "what?%41", "~!#&+"])
def test_request_whose_id_has_special_characters_can_be_cancelled(make_app, connect, backend, request_id):
    async def talk() -> list[httpx.Response]:
        backend.start_script = [asyncio.Event()]
        task = asyncio.create_task(connect({"x-request-id": request_id}).run())
        async with asyncio.timeout(60):
            while not backend.requests:
                await asyncio.sleep(0.001)
        path = f"/v1/chat/completions/{quote(request_id, safe='')}/cancel"
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            said = [await client.post(path), await client.post(path)]
        await task
        return said

    cancelled, again = asyncio.run(talk())
    assert cancelled.json() == {"id": request_id, "object": "chat.completion.cancel", "cancelled": True}
    assert cancelled.status_code == 200
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")
    assert backend.num_starts_cancelled == 1


def test_cancelling_an_unknown_request_is_a_404(send):
    for request_id in ("chatcmpl-1", "x" * 500):
        response = send("POST", f"/v1/chat/completions/{request_id}/cancel")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
        assert request_id[:90] in response.json()["error"]["message"]
        assert len(response.json()["error"]["message"]) < 200
    assert send("GET", "/v1/chat/completions/chatcmpl-1/cancel").status_code == 405
