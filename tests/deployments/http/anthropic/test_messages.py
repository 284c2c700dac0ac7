"""The Messages routes over HTTP: headers, errors in the dialect's words, token counts, cancellation."""

import asyncio

import pytest

from deployments.http.context import IGNORED_HEADER
from deployments.http.generation import TextDelta
from deployments.requests import Route
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, MemoryExceeded, Overloaded, Unavailable
from engine.processing.message import image_sources
from tests.deployments.http.anthropic.conftest import body, events, tool


def error_of(response, status=400):
    """The error object of a response whose body and headers are Anthropic's."""
    answered = response.json()
    assert response.status_code == status, answered
    assert answered["type"] == "error"
    assert answered["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return answered["error"]


def test_answer_carries_the_request_id_of_the_client_in_a_header(create, backend):
    response = create(headers={"x-request-id": "req-1", "anthropic-beta": "a,b"}, foo=1)
    assert response.status_code == 200
    message = response.json()
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert message["id"].startswith("msg_")
    assert response.headers["request-id"] == "req-1"
    assert response.headers[IGNORED_HEADER] == "foo"
    [(request, route)] = backend.requests
    assert (request.request_id, request.max_tokens, route) == (message["id"], 100, Route.TEXT)


def test_stream_has_the_event_types_of_the_messages_api_in_order(create):
    response = create("/v1/messages?beta=true", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"]
    found = events(response.content)
    assert [event["type"] for event in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stream_that_fails_ends_with_an_error_event(create, backend):
    backend.script = [TextDelta("Hel", 1), Unavailable("The engine was lost.", 1.2)]
    response = create(stream=True, headers={"x-request-id": "req-1"})
    last = events(response.content)[-1]
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "The engine was lost.", "retry_after_s": 2},
        "request_id": "req-1",
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_known_api_versions_are_accepted_and_an_unknown_version_is_refused(create, backend, path):
    for version in ("2023-06-01", "2026-10-21"):
        assert create(path, headers={"anthropic-version": version}, temperature=1).status_code == 200
    backend.requests.clear()
    error = error_of(create(path, headers={"anthropic-version": "2024-01-01"}))
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith('anthropic-version: "2024-01-01" is not supported')
    assert backend.requests == []


@pytest.mark.parametrize(
    ("error", "status", "type", "message"),
    [
        (
            ContextLengthExceeded(40000, 4096, 32768),
            400,
            "invalid_request_error",
            "prompt is too long: 40000 tokens > 32768 maximum",
        ),
        (
            ContextLengthExceeded(32768, 1, 32768),
            400,
            "invalid_request_error",
            "prompt is too long: 32768 tokens > 32767 maximum",
        ),
        (
            ContextLengthExceeded(12768, 32000, 32768),
            400,
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 12768 + 32000 > 32768, decrease input length or "
            "`max_tokens` and try again",
        ),
        (
            MemoryExceeded(9000, 100, 8000, 5000, 4000),
            400,
            "invalid_request_error",
            "prompt is too long: 9000 tokens > 8000 maximum",
        ),
        (
            InvalidRequest("the image has 3 bytes", "messages[2].content[1].image_url"),
            400,
            "invalid_request_error",
            "messages.2.content.1.image_url: the image has 3 bytes",
        ),
        (
            InvalidRequest("`tools[0].function` is wrong.", "tools[0].function"),
            400,
            "invalid_request_error",
            "`tools.0.function` is wrong.",
        ),
        (Overloaded("256 requests are waiting.", 1.2), 429, "rate_limit_error", "256 requests are waiting."),
        (Unavailable("The engine was lost.", 1.2), 503, "overloaded_error", "The engine was lost."),
        (EngineFailed("0x7f42"), 500, "api_error", "The engine failed while processing request req-1."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_anthropic_types_and_messages(
    create, backend, error, status, type, message, stream
):
    backend.start_script = [error]
    response = create(stream=stream, headers={"x-request-id": "req-1"})
    assert error_of(response, status) == {"type": type, "message": message}
    assert response.headers.get("retry-after") == ("2" if status in (429, 503) else None)


@pytest.mark.parametrize(("index", "path"), [(0, "messages.2.content.1.content.0"), (1, "messages.2.content.0")])
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_unreadable_image_is_named_by_its_path_in_the_body(create, backend, index, path, route):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [image, {"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
    ]
    create(route, messages=messages, system="S")
    field = list(image_sources(backend.requests[0][0].messages))[index].field
    backend.start_script = [InvalidRequest("the file is no image", field)]
    error = error_of(create(route, messages=messages, system="S"))
    assert error["message"] == f"{path}: the file is no image"


def test_an_unknown_model_is_not_found(create):
    assert error_of(create(model="claude-opus"), 404)["type"] == "not_found_error"


def test_a_thread_is_refused_with_details(create, backend):
    error = error_of(create(thread={"type": "create"}))
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["threads"]}
    assert error["message"].startswith("thread: Extra inputs are not permitted")
    assert backend.requests == []


def test_a_body_that_is_no_json_is_refused_in_the_dialect(send):
    assert error_of(send("POST", "/v1/messages", content=b"{"))["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_refused_by_its_dotted_path(send):
    content = b'{"model": "org/demo", "max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}'
    error = error_of(send("POST", "/v1/messages", content=content))
    assert error["message"].startswith("`messages.0.content` contains an unpaired surrogate")


def test_a_large_body_is_read_in_a_process(create, backend):
    messages = [{"role": "user", "content": "x" * 300_000}]
    assert create(messages=messages).status_code == 200
    assert create(messages=messages, thread={"type": "create"}).json()["error"]["details"]["unsupported"] == ["threads"]
    assert len(backend.requests) == 1


# count_tokens


def test_token_count_request_returns_the_number_of_input_tokens(send, backend):
    sent = {name: value for name, value in body(tools=[tool()], foo=1).items() if name != "max_tokens"}
    response = send("POST", "/v1/messages/count_tokens?beta=true", json=sent)
    assert response.json() == {"input_tokens": 11}
    assert response.headers[IGNORED_HEADER] == "foo"
    assert response.headers["request-id"]
    [(request, route)] = backend.requests
    assert ([tool.name for tool in request.tools], route) == (["find"], Route.TEXT)
    assert backend.in_flight.status()["num_in_flight"] == 0


def test_token_count_request_is_refused_by_the_rules_of_a_message_request(create, backend):
    error = error_of(create("/v1/messages/count_tokens", safeguards=[{"type": "dangerous_tool_use"}]))
    assert error["message"].startswith("safeguards: Extra inputs are not permitted")
    backend.unready = "The engine is being loaded."
    assert error_of(create("/v1/messages/count_tokens"), 503)["type"] == "overloaded_error"


# cancellation


def test_a_message_is_cancelled_by_its_request_id(connect, send, backend, make_app):
    async def talk():
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        app = make_app()
        connection = connect({"x-request-id": "mine"}, app=app, stream=True, max_tokens=10)
        connection.path = "/v1/messages"
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while len(connection.sent) < 2:
                await asyncio.sleep(0.001)
        response = await asyncio.to_thread(send, "POST", "/v1/messages/mine/cancel", app=app)
        await task
        return response, connection.body

    response, stream = asyncio.run(talk())
    assert response.json() == {"id": "mine", "type": "message_cancel", "cancelled": True}
    last = events(stream)[-1]
    assert (last["type"], last["error"]["message"][:11]) == ("error", "The request")


def test_cancelling_an_unknown_message_is_a_404(send):
    error = error_of(send("POST", "/v1/messages/msg_1/cancel"), 404)
    assert error["type"] == "not_found_error"
    assert '"msg_1"' in error["message"]
