"""Each error's status and body; nothing of a library's words reaches a client."""

import json
import logging
import math

import pytest

from deployments.http.dialects import DIALECTS
from deployments.http.error_map import ErrorMap
from deployments.http.generation import TextDelta
from engine.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    MemoryExceeded,
    Overloaded,
    QueueTimeout,
    Unavailable,
)


class TransportError(Exception):
    """Stands for an exception of the layer between the faces and the engine."""


class WrappedError(TransportError, InvalidRequest):
    """As a remote call wraps what was raised on the other side: both classes at once, with arguments of its own."""

    def __init__(self, cause: Exception):
        Exception.__init__(self, cause)
        self.cause = cause


ERRORS = [
    (InvalidRequest("`top_p` is 3.", "top_p"), 400, "top_p", None, "`top_p` is 3."),
    (ContextLengthExceeded(90, 20, 100), 400, "messages", "context_length_exceeded", "100 tokens"),
    (MemoryExceeded(90, 20, 100, 5000, 4000), 400, "messages", "context_length_exceeded", "4000 bytes"),
    (Overloaded("256 requests are waiting.", 1.2), 429, None, "overloaded", "256 requests"),
    (QueueTimeout("It waited for 300 s.", 1.2), 503, None, "queue_timeout", "300 s"),
    (Unavailable("The engine was lost.", 1.2), 503, None, "unavailable", "was lost"),
    (Cancelled("The request was cancelled."), 499, None, "request_cancelled", "was cancelled"),
    (EngineFailed("0x7f42 leaked"), 500, None, "engine_failed", "req-1"),
    (ValueError("0x7f42 leaked"), 500, None, None, "req-1"),
]


@pytest.mark.parametrize(("error", "status", "param", "code", "said"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status_and_body(
    send, backend, error, status, param, code, said, stream
):
    backend.start_script = [error]
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    response = send("POST", "/v1/chat/completions", json=body, headers={"x-request-id": "req-1"})
    answered = response.json()["error"]
    assert (response.status_code, answered["param"], answered["code"]) == (status, param, code)
    assert said in answered["message"]
    assert "leaked" not in response.text
    assert response.headers["content-type"] == "application/json"


AGAIN = [Overloaded, QueueTimeout, Unavailable]
RETRIES = [(1.2, 2), (0.0, 1), (-3.0, 1), (7.0, 7), (60.0, 60), (22860.0, 60), (math.inf, 60), (math.nan, 1)]


@pytest.mark.parametrize("error", AGAIN)
@pytest.mark.parametrize(("retry_after_s", "said"), RETRIES)
def test_retryable_errors_have_a_retry_after_of_at_most_60_whole_seconds(chat, backend, error, retry_after_s, said):
    backend.start_script = [error("full", retry_after_s)]
    for stream in (False, True):
        response = chat(stream=stream)
        assert response.headers["retry-after"] == str(said)
        assert "retry_after_s" not in response.json()["error"]


@pytest.mark.parametrize("error", AGAIN)
def test_error_event_of_a_started_stream_has_the_retry_after_in_its_body(chat, backend, error):
    backend.script = [TextDelta("Hel", 1), error("lost", 1.2)]
    whole = chat()
    assert whole.headers["retry-after"] == "2"
    event = json.loads(chat(stream=True).text.split("\n\n")[-2].removeprefix("data: "))
    assert event["error"] == {**whole.json()["error"], "retry_after_s": 2}


@pytest.mark.parametrize("error", [EngineFailed("oops"), Cancelled("oops"), ValueError("oops")])
def test_errors_that_a_retry_cannot_cure_have_no_retry_after(chat, backend, error):
    backend.script = [TextDelta("Hel", 1), error]
    assert "retry-after" not in chat().headers
    assert "retry_after_s" not in chat(stream=True).text


@pytest.mark.parametrize("error", [QueueTimeout("It waited.", 1.0), Unavailable("It is gone.", 1.0)])
def test_unavailability_and_queue_timeout_are_logged_as_one_line_without_traceback(chat, backend, caplog, error):
    backend.start_script = [error]
    response = chat()
    (record,) = [record for record in caplog.records if record.name == "orchard.http"]
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert response.headers["x-request-id"] in record.getMessage() and error.message in record.getMessage()


def test_unexpected_error_is_logged_with_its_request_id_and_details(chat, backend, caplog):
    backend.start_script = [ValueError("0x7f42")]
    response = chat()
    (record,) = caplog.records
    assert record.name == "orchard.http"
    assert response.headers["x-request-id"] in record.getMessage()
    assert "0x7f42" in caplog.text


def test_an_error_of_the_caller_is_not_logged(chat, caplog):
    chat(top_p=3)
    assert caplog.records == []


def test_converter_turns_foreign_errors_into_api_errors(chat, backend, make_app):
    app = make_app(converters={TransportError: lambda error: Overloaded("busy", 3)})
    backend.start_script = [TransportError()]
    assert chat(app=app).status_code == 429
    backend.script = [TransportError()]
    backend.start_script = []
    assert chat(app=app).status_code == 429
    assert "busy" in chat(app=app, stream=True).text


def test_converter_takes_precedence_over_the_classes_of_a_wrapped_error():
    errors = ErrorMap(DIALECTS, {TransportError: lambda error: error.cause})
    failure = errors.failure(WrappedError(ContextLengthExceeded(90, 20, 100)), "req-1")
    assert (failure.status, failure.code) == (400, "context_length_exceeded")


def test_error_that_its_converter_does_not_convert_is_a_500():
    assert (
        ErrorMap(DIALECTS, {TransportError: lambda error: None}).failure(TransportError("secret"), "req-1").status
        == 500
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v1/model", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/openapi.yaml", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/cache", 405),
        ("PUT", "/v1/cache", 405),
        ("GET", "/v1/cache/entries", 404),
    ],
)
def test_error_body_names_the_unknown_route_or_method(send, method, path, status):
    response = send(method, path)
    assert response.status_code == status
    assert f"{method} {path}" in response.json()["error"]["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/openai/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/mesages", "/v1/messages"),
        ("/v1/Chat/Completions", "/v1/chat/completions"),
        ("/healthz", "/health"),
        ("/ollama/tags", None),
        ("/v2", None),
    ],
)
def test_a_wrong_route_names_the_right_one(send, path, right):
    response = send("POST", path, {})
    message = response.json()["error"]["message"]
    assert response.status_code == 404
    assert message.endswith("does not exist." if right is None else f"does not exist. Did you mean {right}?")


def test_unsupported_method_on_the_cache_lists_the_allowed_methods(send):
    assert set(send("PATCH", "/v1/cache").headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/status"), ("GET", "/health/ready"), ("GET", "/v1/cache"), ("DELETE", "/v1/cache")]
)
def test_backend_that_fails_to_report_its_state_is_a_500_without_details(send, backend, method, path):
    async def broken():
        raise RuntimeError("secret")

    backend.status = backend.not_ready = backend.not_started = backend.cache_status = backend.clear_cache = broken
    response = send(method, path)
    assert response.status_code == 500
    assert "secret" not in response.text
