"""Responses of a cluster: whichever ingress a client asks, it finds, continues, cancels and deletes them."""

import asyncio
import json
import pickle
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import Response

from deployments.http.answer_id import tag_of_node
from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from deployments.http.dialects import tag_in
from deployments.http.generation import TextDelta
from deployments.http.shared_responses import RunningResponse, SharedResponses
from tests.deployments.http.conftest import Connection, FakeBackend

NODES = ("node-1", "node-2")


class Ingress:
    """One of two ingresses, which hear of each other what a wire would carry."""

    def __init__(self, node_id: str, all_of_them: dict[str, "Ingress"]):
        self._others = all_of_them
        self._node_id = node_id
        self.is_silent = False
        self.num_asked = 0
        self.backend = FakeBackend()
        self.responses = SharedResponses(HttpConfig(store_responses="all"), self)
        self.app: FastAPI = create_app(
            self.backend,
            HttpConfig(store_responses="all"),
            frozenset({"image"}),
            responses=self.responses,
            tag=tag_of_node(node_id),
        )
        all_of_them[node_id] = self
        self.backend.cancel = self.cancel

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request of either ingress, as the graph's own does."""
        return any([one.backend.in_flight.cancel(request_id) for one in self._others.values()])

    def others_with_tag_of(self, answer_id: str) -> list[str]:
        return [one for one in self._others if one != self._node_id and tag_of_node(one) == tag_in(answer_id)]

    async def ask(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        there = self._others[node_id]
        there.num_asked += 1
        if there.is_silent:
            raise TimeoutError(f"{node_id} did not answer within {timeout_s} s")
        calls = {"find_response": there.responses.find_here, "delete_response": there.responses.store.delete}
        return pickle.loads(pickle.dumps(calls[method](*args)))  # noqa: S301  # our own bytes


@pytest.fixture
def ingresses() -> list[Ingress]:
    made: dict[str, Ingress] = {}
    return [Ingress(node_id, made) for node_id in NODES]


def ask(ingress: Ingress, method: str, path: str, **fields: Any) -> httpx.Response:
    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(ingress.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, json=fields or None)

    return asyncio.run(talk())


def respond(ingress: Ingress, **fields: Any) -> dict[str, Any]:
    answer = ask(ingress, "POST", "/v1/responses", model="org/demo", **{"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_goes_on_at_another_ingress_as_at_its_own(ingresses: list[Ingress]):
    here, there = ingresses
    first = respond(here)
    second = respond(there, input="And?", previous_response_id=first["id"])
    third = respond(here, input="So?", previous_response_id=second["id"])
    sent = [message["content"] for message in here.backend.requests[-1][0].messages]
    assert sent == ["Hi", "Hello", "And?", "Hello", "So?"]
    assert [tag_in(one["id"]) for one in (first, second, third)] == [
        tag_of_node(node) for node in (NODES[0], NODES[1], NODES[0])
    ]


def test_items_of_another_ingress_are_referred_to_by_their_ids(ingresses: list[Ingress]):
    here, there = ingresses
    item = respond(here)["output"][0]
    respond(there, input=[{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "And?"}])
    assert [message["content"] for message in there.backend.requests[-1][0].messages] == ["Hello", "And?"]


def test_a_response_is_read_listed_and_deleted_at_another_ingress(ingresses: list[Ingress]):
    here, there = ingresses
    first = respond(here)
    path = f"/v1/responses/{first['id']}"
    assert ask(there, "GET", path).json() == first
    assert ask(there, "POST", f"{path}/cancel").json() == first
    assert ask(there, "GET", f"{path}/input_items").json() == ask(here, "GET", f"{path}/input_items").json()
    assert ask(there, "DELETE", path).json() == {"id": first["id"], "object": "response", "deleted": True}
    for ingress in ingresses:
        assert ask(ingress, "GET", path).status_code == ask(ingress, "DELETE", path).status_code == 404


def test_a_response_in_progress_is_read_and_cancelled_at_another_ingress(ingresses: list[Ingress]):
    here, there = ingresses

    async def talk() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        here.backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = Connection(here.app, {"model": "org/demo", "input": "Hi", "stream": True}, {})
        connection.path = "/v1/responses"
        running = asyncio.ensure_future(connection.run())
        while b"output_text.delta" not in connection.body:
            await asyncio.sleep(0.01)
        id = json.loads(connection.body.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(there.app), base_url="http://127.0.0.1") as client:
            read = await client.get(f"/v1/responses/{id}")
            cancelled = await client.post(f"/v1/responses/{id}/cancel")
            await running
            gone = await client.get(f"/v1/responses/{id}")
        return read, cancelled, gone

    read, cancelled, gone = asyncio.run(asyncio.wait_for(talk(), 60))
    assert [read.json()["status"], cancelled.json()["status"], gone.status_code] == ["in_progress", "cancelled", 404]
    for answer in (read, cancelled):
        Response.model_validate(answer.json())
    assert cancelled.json()["output"][0]["status"] == "incomplete"
    assert here.backend.generations[0].num_closed == 1


def test_another_key_finds_nothing_at_another_ingress_either(ingresses: list[Ingress]):
    here, there = ingresses
    id = respond(here)["id"]
    assert asyncio.run(there.responses.find("another key", id)) is None
    assert not asyncio.run(there.responses.delete("another key", id))
    assert asyncio.run(there.responses.find("", id)) is not None


def test_an_ingress_that_does_not_answer_is_named_and_may_be_asked_again(ingresses: list[Ingress]):
    here, there = ingresses
    first = respond(here)
    here.is_silent = True
    for answer in (
        ask(there, "GET", f"/v1/responses/{first['id']}"),
        ask(there, "POST", "/v1/responses", model="org/demo", input="And?", previous_response_id=first["id"]),
    ):
        assert answer.status_code == 503 and "node-1" in answer.json()["error"]["message"], answer.text
        assert "retry-after" in answer.headers
    here.is_silent = False
    assert ask(there, "GET", f"/v1/responses/{first['id']}").json() == first


@pytest.mark.parametrize("id", [f"resp_{tag_of_node('node-9')}{'0' * 28}", "resp_1", "chatcmpl-1", "../x"])
def test_nobody_is_asked_about_an_id_that_no_other_ingress_has_made(ingresses: list[Ingress], id: str):
    here, there = ingresses
    assert asyncio.run(there.responses.find("", id)) is None
    assert not asyncio.run(there.responses.delete("", id))
    assert here.num_asked == 0


def test_the_items_of_a_cancelled_response_are_incomplete():
    items = [{"id": "a", "status": "completed"}, {"id": "b", "status": "in_progress"}, {"id": "c"}]
    cancelled = RunningResponse({"status": "in_progress", "output": items}, is_stored=True).cancelled()
    assert cancelled["status"] == "cancelled"
    assert [item.get("status") for item in cancelled["output"]] == ["completed", "incomplete", None]
