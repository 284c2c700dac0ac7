"""How the graph behaves under several clients at once, and where its processes are."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.pictures import about, image_part, shape

pytestmark = pytest.mark.server

LONG = "Repeat after me: " + " ".join(["red", "green", "blue", "yellow"] * 60)
"""Makes the demo model write for several hundred tokens."""

ENDLESS = 2000
"""Tokens of an answer that lasts far longer than it takes to notice that its client has gone."""

MB = 2**20


def mixed_conversations() -> list[list[dict[str, Any]]]:
    texts = ["What is 12 + 30?", "Tell me a story.", "What is the capital of France?", "List four colors."]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    for color, kind in (("red", "circle"), ("blue", "square"), ("green", "circle"), ("yellow", "square")):
        conversations.append(about("What is in the image?", image_part(shape(color, kind))))
    return conversations


def answer_to(client: openai.OpenAI, messages: list[dict[str, Any]]) -> tuple[str | None, int]:
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)  # pyright: ignore
    assert answer.usage is not None
    return answer.choices[0].message.content, answer.usage.completion_tokens


def endless_stream(client: openai.OpenAI, n: int = 1) -> openai.Stream[ChatCompletionChunk]:
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": LONG}],
        temperature=0,
        max_tokens=ENDLESS,
        extra_body={"min_tokens": ENDLESS},
        stream=True,
        n=n,
    )


def engine_status(http: httpx.Client) -> dict[str, Any]:
    engines = http.get("/v1/status").json()["engines"]
    assert len(engines) == 1, "one node, one engine process"
    return engines[0]


def wait_until_idle(http: httpx.Client, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (status := engine_status(http)["engine"])["num_running"] + status["num_waiting"] > 0:
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def test_concurrent_mixed_requests_get_the_same_answers_as_alone(client: openai.OpenAI, http: httpx.Client):
    conversations = mixed_conversations()
    pid = engine_status(http)["pid"]
    alone = [answer_to(client, messages) for messages in conversations]
    with ThreadPoolExecutor(len(conversations)) as pool:
        together = list(pool.map(lambda messages: answer_to(client, messages), conversations))
    assert together == alone
    engine = engine_status(http)
    assert engine["pid"] == pid
    assert engine["engine"]["max_rows_in_a_step"] >= 2


def test_a_late_short_request_does_not_wait_for_a_long_one(client: openai.OpenAI, http: httpx.Client):
    wait_until_idle(http, 30)
    with endless_stream(client) as long:
        chunks = iter(long)
        for _ in range(3):
            next(chunks)
        answer, _ = answer_to(client, [{"role": "user", "content": "What is 12 + 30?"}])
        assert answer is not None and "42" in answer
        assert engine_status(http)["engine"]["num_running"] == 1, "the long one is still being written"
    wait_until_idle(http, 30)


def test_client_that_disconnects_frees_its_row_before_the_answer_ends(client: openai.OpenAI, http: httpx.Client):
    before = wait_until_idle(http, 30)
    stream = endless_stream(client)
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    assert engine_status(http)["engine"]["num_running"] == 1
    stream.close()
    after = wait_until_idle(http, 30)
    assert after["num_aborted"] == before["num_aborted"] + 1
    assert after["num_output_tokens"] - before["num_output_tokens"] < ENDLESS // 2


@pytest.mark.night("tests/deployments/test_faults.py, with several choices")
def test_disconnect_of_a_client_frees_the_rows_of_all_its_choices(client: openai.OpenAI, http: httpx.Client):
    before = wait_until_idle(http, 30)
    stream = endless_stream(client, n=4)
    for chunk in stream:
        if chunk.choices[0].index == 3 and chunk.choices[0].delta.content:
            break
    assert engine_status(http)["engine"]["num_running"] == 4
    stream.close()
    after = wait_until_idle(http, 30)
    assert after["num_aborted"] == before["num_aborted"] + 4
    assert after["num_output_tokens"] - before["num_output_tokens"] < 4 * ENDLESS // 2


@pytest.mark.night("tests/deployments/test_faults.py, at every seam")
def test_client_that_disconnects_before_the_first_token_frees_its_row(http: httpx.Client):
    before = wait_until_idle(http, 30)
    prompt = "Read this list. " + " ".join(["apple", "pear", "plum"] * 1500)
    body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 500}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(10.0, read=0.5))
    after = wait_until_idle(http, 30)  # the step that is running ends first
    assert after["num_aborted"] == before["num_aborted"] + 1


@pytest.mark.parametrize(("sent", "is_kept"), [("mine/1", True), ("x" * 129, False), ("a b", False), (None, False)])
@pytest.mark.night("deployments/http_proxy/test_guard.py, with the real proxy")
def test_a_response_has_exactly_one_request_id(http: httpx.Client, sent: str | None, is_kept: bool):
    """Serve's proxy and the ingress both know it; an id that is not sane never comes back."""
    headers = {"X-Request-ID": sent} if sent else {}
    for path in ("/v1/models", "/nope"):
        (request_id,) = http.get(path, headers=headers).headers.get_list("x-request-id")
        assert (request_id == sent) == is_kept and " " not in request_id


def test_stalled_uploads_do_not_keep_other_clients_out(http: httpx.Client, base_url: str):
    """As many half-sent bodies as there is room for: they lose their places to those that come."""
    host, port = base_url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            silent = stack.enter_context(socket.create_connection((host, int(port))))
            silent.sendall(head + b"Content-Length: 9\r\n\r\n{")
        deadline = time.monotonic() + 60
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        while (status := http.post("/v1/chat/completions", json=body).status_code) != 200:
            assert status == 429 and time.monotonic() < deadline, status
            time.sleep(0.2)


@pytest.mark.night("deployments/http_proxy/test_guard.py, with the real proxy")
def test_the_proxy_refuses_a_body_that_is_too_large_before_it_is_sent(http: httpx.Client, base_url: str):
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sender:
        sender.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 67108865\r\n\r\n{"
        )
        assert sender.recv(2**16).startswith(b"HTTP/1.1 413 ")
    deadline = time.monotonic() + 30  # the connections of the test before are still being closed
    while (num_unread := http.get("/v1/status").json()["bodies"]["num_unread"]) != 0:
        assert time.monotonic() < deadline, num_unread
        time.sleep(0.1)


def test_only_engine_and_scorer_load_mlx_and_other_processes_stay_small(http: httpx.Client):
    status = http.get("/v1/status").json()
    for deployment in ("engines", "spec_prefill"):
        assert [replica["has_mlx"] for replica in status[deployment]] == [True], deployment
    for deployment in ("ingress", "text", "mllm"):
        assert len(status[deployment]) == 1
        for replica in status[deployment]:
            assert not replica["has_mlx"], deployment
            assert replica["rss_bytes"] < 600 * MB, deployment
    pids = {
        replica["pid"] for name in ("engines", "spec_prefill", "ingress", "text", "mllm") for replica in status[name]
    }
    assert len(pids) == 5


def test_status_shows_the_configuration_in_effect(http: httpx.Client):
    status = http.get("/v1/status").json()
    assert status["config"]["engine"]["max_running"] == 32
    assert status["model"] == "demo"
    assert http.get("/health/ready").status_code == 200
