"""IngressPeers: which ingress is asked about an id or a key."""

import asyncio
from typing import Any

import pytest

from deployments.calls.ingress_peers import IngressPeers
from deployments.http.answer_id import new_answer_id, tag_of_node
from tests.deployments.fake_handle import FakeCall, FakeHandle, running


class Ingresses(FakeHandle):
    """Ingresses on nodes; each call returns its node. asked: session ids and arguments."""

    def __init__(self, *node_ids: str):
        self.replicas = running(*node_ids)
        self.asked: list[tuple[str, str, tuple[Any, ...]]] = []

    def running(self) -> dict[str, Any]:
        return self.replicas

    def call(self, *arguments: Any) -> FakeCall:
        self.asked.append((self.chosen["session_id"], self.chosen["method_name"], arguments))
        return FakeCall("said")


def peers_of(ingresses: Ingresses, node_id: str = "node-0") -> IngressPeers:
    return IngressPeers(ingresses, node_id, node_id.replace("node", "replica"))  # type: ignore[arg-type]


def test_answer_of_another_ingress_is_asked_for_there():
    peers = peers_of(Ingresses("node-0", "node-1", "node-2"))
    for node_id in ("node-1", "node-2"):
        assert peers.others_with_tag_of(new_answer_id("msg_", tag_of_node(node_id))) == [node_id]
    assert peers.others_with_tag_of(new_answer_id("msg_", tag_of_node("node-0"))) == []
    assert peers.others_with_tag_of(new_answer_id("msg_", tag_of_node("node-9"))) == []
    assert peers.others_with_tag_of("mine") == []


def test_all_ingresses_agree_on_the_home_of_a_key():
    ingresses = Ingresses("node-0", "node-1", "node-2")
    seen = [[peers_of(ingresses, node_id).home_of(key) for key in range(200)] for node_id in ("node-0", "node-2")]
    assert seen[0] == seen[1] and set(seen[0]) == {"node-0", "node-1", "node-2"}


def test_ingresses_that_come_and_go_are_followed():
    ingresses = Ingresses("node-0")
    peers = peers_of(ingresses)
    assert {peers.home_of(key) for key in range(50)} == {"node-0"}
    ingresses.replicas = running("node-0", "node-1")
    assert {peers.home_of(key) for key in range(50)} == {"node-0", "node-1"} and peers.is_running("replica-1")
    del ingresses.replicas["replica-1"]
    assert {peers.home_of(key) for key in range(50)} == {"node-0"} and not peers.is_running("replica-1")


def test_a_call_is_pinned_to_the_node():
    async def go() -> Any:
        return await peers_of(ingresses).ask("node-1", 1.0, "cancel_here", "mine")

    ingresses = Ingresses("node-0", "node-1")
    assert asyncio.run(go()) == "said"
    assert ingresses.asked == [("node:node-1@0", "cancel_here", ("mine",))]


@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_without_ray_there_are_no_others(key: int):
    peers = IngressPeers(None, "", "")
    assert peers.home_of(key) == "" and peers.others_with_tag_of(new_answer_id("msg_", tag_of_node(""))) == []
    assert asyncio.run(peers.ask_all(1.0, "cancel_here", "mine")) == []
