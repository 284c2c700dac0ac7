"""Draining a node over HTTP, and what a request says of where and how it is answered."""

from typing import Any

import pytest

from tests.deployments.http.test_access import REMOTE, ask, assert_refused

assert ask is not None  # the fixture


def test_a_node_is_drained_and_takes_requests_again(send: Any, backend: Any):
    answer = send("POST", "/v1/nodes/node-1/drain").json()
    assert answer.pop("snapshots") == {
        "num_offered": 3,
        "num_taken": 2,
        "num_files": 5,
        "num_bytes": 10**6,
        "seconds": 60.0,
        "refused": {"deadline": 1},
    }
    assert answer == {"id": "node-1", "object": "node.drain", "draining": True}
    assert backend.drained == {"node-1": True}
    assert send("DELETE", "/v1/nodes/node-1/drain").json()["draining"] is False
    assert backend.drained == {"node-1": False}


@pytest.mark.parametrize("text", ["0", "2.5", "3600"])
def test_the_client_limits_the_time_of_the_snapshots(send: Any, text: str):
    answer = send("POST", f"/v1/nodes/node-1/drain?deadline_s={text}").json()
    assert answer["snapshots"]["seconds"] == float(text)


@pytest.mark.parametrize(
    ("method", "query", "message"),
    [
        ("POST", "deadline_s=-1", "deadline_s is '-1'; it must be a number from 0 to 3600"),
        ("POST", "deadline_s=3601", "deadline_s is '3601'; it must be a number from 0 to 3600"),
        ("POST", "deadline_s=nan", "deadline_s is 'nan'; it must be a number from 0 to 3600"),
        ("POST", "deadline_s=soon", "deadline_s is 'soon'; it must be a number from 0 to 3600"),
        ("POST", "deadline=1", "POST /v1/nodes/{id}/drain has no parameter 'deadline'"),
        ("DELETE", "deadline_s=1", "DELETE /v1/nodes/{id}/drain has no parameter 'deadline_s'"),
    ],
)
def test_a_wrong_parameter_of_a_drain_is_named_and_nothing_is_drained(
    send: Any, backend: Any, method: str, query: str, message: str
):
    response = send(method, f"/v1/nodes/node-1/drain?{query}")
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert backend.drained == {"node-1": False}


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_node_that_is_not_there_is_named(send: Any, method: str):
    response = send(method, "/v1/nodes/nowhere/drain")
    assert_refused(response, 404, "node_not_found", "nowhere")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_only_an_administrator_drains_a_node(ask: Any, backend: Any, method: str):
    response = ask(method, "/v1/nodes/node-1/drain", {}, REMOTE, open=True)
    assert_refused(response, 403, "not_administrative", f"{method} /v1/nodes/{{id}}/drain")
    assert backend.drained == {"node-1": False}


@pytest.mark.parametrize(("value", "resume"), [(None, None), ("on", True), ("off", False)])
def test_a_request_says_whether_its_answer_may_go_on_elsewhere(
    send: Any, backend: Any, value: str | None, resume: bool | None
):
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}]}
    headers = {} if value is None else {"X-Orchard-Resume": value}
    assert send("POST", "/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert backend.requests[0][0].resume is resume


@pytest.mark.parametrize("value", ["", "yes", "ON", "off, on"])
def test_another_value_of_the_header_is_refused(send: Any, value: str):
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}]}
    response = send("POST", "/v1/chat/completions", json=body, headers={"X-Orchard-Resume": value})
    assert response.status_code == 400 and "X-Orchard-Resume" in response.json()["error"]["message"]


def test_the_nodes_of_an_answer_are_in_a_header_of_both_kinds_of_response(
    send: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.deployments.http.conftest.FakeGeneration.node_ids", ("a1", "b2"))
    for stream in (False, True):
        body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        assert send("POST", "/v1/chat/completions", json=body).headers["x-orchard-node"] == "a1, b2"
