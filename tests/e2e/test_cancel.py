"""A request is cancelled by its id from outside, whatever it is doing: its client is told, and its rows are freed."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.e2e.test_serving import LONG, engine_status, wait_until_idle

pytestmark = pytest.mark.server

ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 2000, "min_tokens": 2000}
"""It lasts for a minute or more."""
PROMPT = "Read this list. " + " ".join(["apple", "pear", "plum"] * 2500)
"""It takes seconds to be taken in."""
SOON_S = 60.0


def body(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **ANSWER, **fields}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def idle(http: httpx.Client) -> Iterator[dict[str, Any]]:
    """The engine's status before a test, which must leave nothing behind."""
    yield wait_until_idle(http, SOON_S)
    wait_until_idle(http, SOON_S)
    (ingress,) = http.get("/v1/status").json()["ingress"]
    assert ingress["num_in_flight"] == 0 and not ingress["is_draining"]


def cancel(http: httpx.Client, request_id: str) -> httpx.Response:
    return http.post(f"/v1/chat/completions/{request_id}/cancel")


def send(pool: ThreadPoolExecutor, http: httpx.Client, request_id: str, **fields: Any) -> Future[httpx.Response]:
    return pool.submit(http.post, "/v1/chat/completions", json=body(**fields), headers={"x-request-id": request_id})


def until(http: httpx.Client, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition(status := engine_status(http)["engine"]):
        assert time.monotonic() < deadline, status


def until_in_flight(http: httpx.Client, num_choices: int) -> None:
    deadline = time.monotonic() + SOON_S
    while (found := http.get("/v1/status").json()["ingress"][0]["num_in_flight"]) != num_choices:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def assert_cancelled(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (499, "request_cancelled")


def test_a_stream_is_cancelled_by_the_id_of_its_completion(http: httpx.Client, idle: dict[str, Any]):
    with http.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response:
        lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
        first = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
        cancelled = cancel(http, first[0]["id"])
        *_, last = lines
    assert cancelled.status_code == 200
    assert cancelled.json() == {"id": first[0]["id"], "object": "chat.completion.cancel", "cancelled": True}
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert wait_until_idle(http, SOON_S)["num_aborted"] == idle["num_aborted"] + 1


@pytest.mark.night("choices end with their request in deployments/http/test_in_flight.py")
def test_answer_of_several_choices_is_cancelled_by_the_request_id_of_its_client(
    http: httpx.Client, pool: ThreadPoolExecutor, idle: dict[str, Any]
):
    answer = send(pool, http, "mine/1", n=4)
    until(http, lambda status: status["num_running"] == 4 and status["num_output_tokens"] > idle["num_output_tokens"])
    assert cancel(http, "mine%2F1").json()["cancelled"] is True
    assert_cancelled(answer.result(SOON_S))
    assert wait_until_idle(http, SOON_S)["num_aborted"] == idle["num_aborted"] + 4
    again = cancel(http, "mine%2F1")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_request_is_cancelled_during_its_prefill(
    http: httpx.Client, pool: ThreadPoolExecutor, idle: dict[str, Any], stream: bool
):
    answer = send(pool, http, "long", text=PROMPT, stream=stream, cache_salt=f"cancel-{stream}", specprefill=False)
    until(http, lambda status: status["num_running"] + status["num_waiting"] == 1)
    assert cancel(http, "long").status_code == 200
    assert_cancelled(answer.result(SOON_S))
    assert wait_until_idle(http, SOON_S)["num_output_tokens"] == idle["num_output_tokens"]


@pytest.mark.usefixtures("idle")
def test_queued_request_is_cancelled_and_the_running_request_goes_on(http: httpx.Client, pool: ThreadPoolExecutor):
    running = send(pool, http, "running", n=32)
    until(http, lambda status: status["num_running"] == 32)
    waiting = send(pool, http, "waiting")
    until(http, lambda status: status["num_waiting"] == 1)
    assert cancel(http, "waiting").status_code == 200
    assert_cancelled(waiting.result(SOON_S))
    until(http, lambda status: status["num_waiting"] == 0)
    assert engine_status(http)["engine"]["num_running"] == 32
    assert cancel(http, "running").status_code == 200
    assert_cancelled(running.result(SOON_S))


@pytest.mark.usefixtures("idle")
@pytest.mark.night("deployments/http/test_in_flight.py cancels all of an id")
def test_all_requests_with_the_same_id_are_cancelled(http: httpx.Client, pool: ThreadPoolExecutor):
    answers = [send(pool, http, "twice") for _ in range(2)]
    until(http, lambda status: status["num_running"] == 2)
    assert cancel(http, "twice").status_code == 200
    for answer in answers:
        assert_cancelled(answer.result(SOON_S))


def half_sent(base_url: str, request_id: str, body: bytes) -> tuple[HTTPConnection, bytes]:
    """A request of which a tenth has been sent, and the rest of it."""
    connection = HTTPConnection(base_url.removeprefix("http://"), timeout=SOON_S)
    connection.putrequest("POST", "/v1/chat/completions")
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body[: len(body) // 10])
    return connection, body[len(body) // 10 :]


@pytest.mark.night("deployments/http/test_unread_bodies.py frees the place of the body")
def test_request_is_cancelled_while_its_body_is_being_sent(http: httpx.Client, base_url: str, idle: dict[str, Any]):
    connection, _ = half_sent(base_url, "half", json.dumps(body()).encode())
    deadline = time.monotonic() + SOON_S
    while (bodies := http.get("/v1/status").json()["bodies"])["num_unread"] != 1:
        assert time.monotonic() < deadline, bodies
    assert cancel(http, "half").status_code == 200
    response = connection.getresponse()
    assert (response.status, json.load(response)["error"]["code"]) == (499, "request_cancelled")
    connection.close()


@pytest.mark.usefixtures("idle")
def test_full_server_refuses_a_half_sent_request_and_its_connection_stays_usable(http: httpx.Client, base_url: str):
    config = http.get("/v1/status").json()["config"]["engine"]
    num_choices, num_requests = config["max_running"], 1 + config["max_queue"] // config["max_running"]
    with ThreadPoolExecutor(num_requests) as pool:
        crowd = [send(pool, http, "crowd", n=num_choices) for _ in range(num_requests)]
        until_in_flight(http, num_choices * num_requests)
        large = json.dumps(body("apple " * 2_000_000)).encode()
        connection, rest = half_sent(base_url, "one more", large)
        refused = connection.getresponse()
        assert (refused.status, json.load(refused)["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        connection.send(rest)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        json_body = {"content-type": "application/json"}
        assert http.post("/v1/chat/completions", content=large, headers=json_body).status_code == 429
        assert cancel(http, "crowd").status_code == 200
        for answer in crowd:
            assert_cancelled(answer.result(SOON_S))


@pytest.mark.night("deployments/http/test_context.py answers 404")
def test_finished_or_unknown_request_cannot_be_cancelled(http: httpx.Client):
    short = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    over = http.post("/v1/chat/completions", json=short, headers={"x-request-id": "over"})
    assert over.status_code == 200
    for request_id in ("over", over.json()["id"], "never"):
        response = cancel(http, request_id)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
