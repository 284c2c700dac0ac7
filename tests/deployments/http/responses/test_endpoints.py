"""Stored responses: continued, read, listed, deleted and cancelled."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from deployments.http.generation import TextDelta, ToolCall
from deployments.requests import Route
from tests.deployments.http.conftest import Connection
from tests.deployments.http.responses.conftest import events_of

UNKNOWN = "resp_" + "0" * 32
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


@pytest.fixture
def app(make_app: Callable[..., Any]) -> Any:
    return make_app(store_responses="all")


def messages_of(backend: Any) -> list[Any]:
    return list(backend.requests[-1][0].messages)


def assert_not_found(response: httpx.Response, id: str, param: str | None = None, code: str = "response_not_found"):
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, code, param)
    assert id in error["message"]


def test_a_conversation_goes_on_from_a_stored_response(app, respond, backend):
    first = respond(app, instructions="Be kind.").json()
    second = respond(app, input="And?", previous_response_id=first["id"], instructions="Be brief.").json()
    assert messages_of(backend) == [  # instructions are not inherited
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    assert second["previous_response_id"] == first["id"]
    respond(app, input="So?", previous_response_id=second["id"])
    assert [message["content"] for message in messages_of(backend)] == ["Hi", "Hello", "And?", "Hello", "So?"]
    respond(app, input="Or?", previous_response_id=first["id"])
    assert [message["content"] for message in messages_of(backend)] == ["Hi", "Hello", "Or?"]


def test_continued_conversation_reaches_the_engine_like_a_resent_conversation(app, respond, backend):
    tools = [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]}]
    call = ToolCall("call_1", "agents.wait", "{}")
    backend.script = [
        TextDelta("", 1, reasoning="hm"),
        TextDelta("Wait.", 1),
        TextDelta("", 1, "tool_calls", tool_calls=(call,)),
    ]
    first = respond(app, tools=tools).json()
    output = {"type": "function_call_output", "call_id": "call_1", "output": [IMAGE]}
    respond(app, tools=tools, input=[output], previous_response_id=first["id"])
    stored, route = messages_of(backend), backend.requests[-1][1]
    respond(app, tools=tools, input=[{"role": "user", "content": "Hi"}, *first["output"], output])
    assert stored == messages_of(backend)
    assert stored[1]["reasoning_content"] == "hm"
    assert stored[1]["tool_calls"][0]["function"]["name"] == "agents.wait"
    assert route == Route.MLLM


def test_a_streamed_response_is_stored_like_a_whole_one(app, respond, send):
    response = events_of(respond(app, stream=True).text)[-1]["response"]
    assert send("GET", f"/v1/responses/{response['id']}", app=app).json() == response


def test_large_conversation_goes_on_from_a_stored_response(app, respond, backend):
    text = "word " * 40_000
    first = respond(app, input=text).json()
    assert respond(app, input="And?", previous_response_id=first["id"]).status_code == 200
    assert messages_of(backend)[0]["content"] == text


def test_a_conversation_beyond_the_limit_of_a_body_is_refused(make_app, respond):
    app = make_app(store_responses="all", max_body_bytes=20_000)
    first = respond(app, input="a" * 15_000).json()
    refused = respond(app, input="b" * 15_000, previous_response_id=first["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert "20000" in refused.json()["error"]["message"]


def test_an_unknown_previous_response_is_not_found(respond, backend):
    refused = respond(previous_response_id=UNKNOWN)
    assert_not_found(refused, UNKNOWN, "previous_response_id", "previous_response_not_found")
    assert backend.requests == []


def test_a_response_that_was_not_to_be_stored_is_not_found(app, respond, send):
    for stream in (False, True):
        sent = respond(app, store=False, stream=stream)
        response = events_of(sent.text)[-1]["response"] if stream else sent.json()
        assert response["store"] is False
        assert_not_found(send("GET", f"/v1/responses/{response['id']}", app=app), response["id"])


@pytest.mark.parametrize(
    ("policy", "asked", "is_stored"),
    [
        *(("off", asked, False) for asked in (None, True, False)),
        *(("asked", asked, bool(asked)) for asked in (None, True, False)),
        *(("all", asked, asked is not False) for asked in (None, True, False)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_as_the_server_and_its_request_say(
    make_app, respond, send, policy: str, asked: bool | None, is_stored: bool, stream: bool
):
    app = make_app(store_responses=policy)
    sent = respond(app, stream=stream, **({} if asked is None else {"store": asked}))
    response = events_of(sent.text)[-1]["response"] if stream else sent.json()
    found = send("GET", f"/v1/responses/{response['id']}", app=app)

    assert response["store"] is is_stored
    assert sent.headers.get("x-orchard-ignored") == ("store" if policy == "off" and asked else None)
    if is_stored:
        assert found.json()["id"] == response["id"]
    else:
        assert_not_found(found, response["id"])


def test_a_response_that_continues_a_stored_one_is_stored(make_app, respond):
    app = make_app()
    first = respond(app, store=True).json()
    second = respond(app, previous_response_id=first["id"]).json()
    assert second["store"] is True
    assert respond(app, previous_response_id=second["id"], store=False).json()["store"] is False


def test_references_stand_for_stored_items(app, respond, send, backend):
    first = respond(app).json()
    (listed,) = send("GET", f"/v1/responses/{first['id']}/input_items", app=app).json()["data"]
    ids = [listed["id"], first["output"][0]["id"]]
    second = respond(
        app, input=[*({"type": "item_reference", "id": id} for id in ids), {"role": "user", "content": "?"}]
    )
    assert [message["content"] for message in messages_of(backend)] == ["Hi", "Hello", "?"]
    respond(app, input="!", previous_response_id=second.json()["id"])
    assert [message["content"] for message in messages_of(backend)] == ["Hi", "Hello", "?", "Hello", "!"]


def test_references_cannot_expand_an_input_beyond_the_body_limit(make_app, respond):
    app = make_app(store_responses="all", max_body_bytes=20_000)
    first = respond(app, input="a" * 10_000).json()
    reference = {"type": "item_reference", "id": f"msg_{first['id'].removeprefix('resp_')}i0"}
    assert respond(app, input=[reference]).status_code == 200
    refused = respond(app, input=[reference] * 2)
    assert refused.status_code == 400
    assert "20000" in refused.json()["error"]["message"]


def test_an_unknown_reference_is_not_found(app, respond):
    known = respond(app).json()["id"].removeprefix("resp_")
    for id, param in [("msg_mine", "input"), (f"msg_{'0' * 32}0", "input"), (f"msg_{known}99", "input[0]")]:
        assert_not_found(respond(app, input=[{"type": "item_reference", "id": id}]), id, param)


def test_a_stored_response_can_be_read_and_deleted(app, respond, send):
    response = respond(app).json()
    path = f"/v1/responses/{response['id']}"
    read = send("GET", path, app=app)
    assert read.json() == response
    Response.model_validate(read.json())
    assert send("GET", f"{path}?stream=true", app=app).json()["error"]["param"] == "stream"
    assert send("DELETE", path, app=app).json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, more in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        assert_not_found(send(method, path + more, app=app), response["id"])
    refused = respond(app, previous_response_id=response["id"])
    assert_not_found(refused, response["id"], "previous_response_id", "previous_response_not_found")


def test_a_deleted_response_stays_part_of_its_conversation(app, respond, send, backend):
    first = respond(app).json()
    second = respond(app, input="And?", previous_response_id=first["id"]).json()
    send("DELETE", f"/v1/responses/{first['id']}", app=app)
    respond(app, input="So?", previous_response_id=second["id"])
    assert [message["content"] for message in messages_of(backend)] == ["Hi", "Hello", "And?", "Hello", "So?"]


def test_input_items_come_in_pages(app, respond, send):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_mine"}
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]
    path = f"/v1/responses/{respond(app, input=items).json()['id']}/input_items"
    listed = send("GET", f"{path}?order=asc", app=app).json()
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output"]
    assert [item["type"] for item in listed["data"]] == kinds
    for item in listed["data"]:
        TypeAdapter(ResponseItem).validate_python(item)
    assert listed["data"][3] == {**call, "status": "completed"}
    ids = [item["id"] for item in listed["data"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[-1], False)
    newest = send("GET", f"{path}?limit=2", app=app).json()
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (ids[:-3:-1], True)
    rest = send("GET", f"{path}?limit=3&after={newest['last_id']}", app=app).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2::-1], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_invalid_page_parameter_is_refused_by_name(app, respond, send, query, param):
    id = respond(app).json()["id"]
    response = send("GET", f"/v1/responses/{id}/input_items?{query}", app=app)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("place", ["api_keys", "api_keys_file"])
def test_response_is_found_only_with_the_api_key_that_created_it(make_app, respond, send, tmp_path, place):
    hashes = {key: f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in ("one", "two")}
    file = tmp_path / "keys.json"
    file.touch(0o600)
    file.write_text(json.dumps([{"hash": hash, "name": name} for name, hash in hashes.items()]))
    app = make_app(
        store_responses="all",
        **({"api_keys": list(hashes.values())} if place == "api_keys" else {"api_keys_file": str(file)}),
    )
    one, two = ({"Authorization": f"Bearer {key}"} for key in hashes)
    response = respond(app, headers=one).json()
    path = f"/v1/responses/{response['id']}"
    for method, more in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        assert_not_found(send(method, path + more, app=app, headers=two), response["id"])
    assert respond(app, headers=two, previous_response_id=response["id"]).status_code == 404
    assert send("GET", path, app=app, headers={"x-api-key": "one"}).status_code == 200
    assert respond(app, headers=one, previous_response_id=response["id"]).status_code == 200


class ResponsesConnection(Connection):
    """One raw request for a response, so that it can be looked at while it runs."""

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
        }
        await self.app(scope, self._receive, self._send)


def test_a_running_response_can_be_read_and_cancelled(app, backend):
    async def talk() -> tuple[httpx.Response, httpx.Response, httpx.Response, list[dict[str, Any]]]:
        never, begun = asyncio.Event(), asyncio.Event()
        backend.script = [TextDelta("Hel", 1), never]
        connection = ResponsesConnection(app, {"model": "org/demo", "input": "Hi", "stream": True}, {})
        connection._send = noting(connection._send, begun)
        running = asyncio.ensure_future(connection.run())
        await begun.wait()
        id = events_of(connection.body.decode())[0]["response"]["id"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            read = await client.get(f"/v1/responses/{id}")
            cancelled = await client.post(f"/v1/responses/{id}/cancel")
            await running
            gone = await client.get(f"/v1/responses/{id}")
        return read, cancelled, gone, events_of(connection.body.decode())

    read, cancelled, gone, events = asyncio.run(talk())
    assert read.json()["status"] == "in_progress"
    assert read.json()["output"][0]["content"][0]["text"] == "Hel"
    assert cancelled.json()["status"] == "cancelled"
    for response in (read, cancelled):
        Response.model_validate(response.json())
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert gone.status_code == 404
    assert backend.generations[0].num_closed == 1


def noting(send: Any, begun: asyncio.Event) -> Any:
    """Sets the event when text has been sent."""

    async def send_and_note(message: Any) -> None:
        await send(message)
        if b"output_text.delta" in message.get("body", b""):
            begun.set()

    return send_and_note


def test_a_response_that_no_ingress_has_is_not_cancelled(app, send, backend):
    async def cancel(id: str) -> bool:
        raise AssertionError(f"{id} was looked for")

    backend.cancel = cancel
    for id in (UNKNOWN, "chatcmpl-1"):
        assert_not_found(send("POST", f"/v1/responses/{id}/cancel", app=app), id)


def test_cancelling_a_complete_response_changes_nothing(app, respond, send):
    response = respond(app).json()
    assert send("POST", f"/v1/responses/{response['id']}/cancel", app=app).json() == response


def test_warm_up_request_of_codex_with_empty_input_is_answered(respond, backend):
    response = respond(input="", max_output_tokens=1)
    assert response.status_code == 200
    assert messages_of(backend) == [{"role": "user", "content": ""}]
    assert json.loads(response.content)["object"] == "response"
