"""Which replicas a router calls while two versions of the code run in one cluster."""

import asyncio
import pickle
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest
from ray.cloudpickle.cloudpickle import dumps

from deployments.app import MLLM, Ingress, ModelReplica, SpecPrefillScorer, TextMTP
from deployments.args import AppArgs
from deployments.calls import population
from deployments.calls.ingress_peers import IngressPeers
from deployments.calls.population import CODE, among, messages_digest, own_code
from deployments.calls.replica_choice import NoOtherReplica
from deployments.dispatch.engine_nodes import EngineNodes
from deployments.ray_internals import RunningNode
from engine.config import EngineConfig, rebuilt
from tests.deployments.fake_handle import FakeHandle, running

OWN = {CODE: own_code()}
OTHER = {CODE: {**own_code(), "population": "another"}}
FOREIGN = {CODE: {"population": "another", "messages": "others"}}


def node(name: str, metadata: dict[str, Any]) -> RunningNode:
    return RunningNode(name, f"replica of {name}", metadata)


class Replicas(FakeHandle):
    """A handle to running replicas with metadata by node."""

    def __init__(self, metadata: dict[str, dict[str, Any]]):
        self.replicas = running(*metadata)
        for replica in self.replicas.values():
            replica.replica_metadata = metadata[replica.node_id]

    def running(self) -> dict[str, Any]:
        return self.replicas


def chosen(metadata: dict[str, dict[str, Any]], **options: Any) -> set[str]:
    """Choose many times; return the nodes."""

    async def go() -> set[str]:
        nodes = EngineNodes(Replicas(metadata))  # type: ignore[arg-type]
        return {(await nodes.choose(waits=False, **options)).node_id for _ in range(40)}

    return asyncio.run(go())


def test_requests_stay_within_their_population_while_it_has_an_engine():
    mixed = {"node-0": OWN, "node-1": OTHER, "node-2": OWN}
    assert chosen(mixed) == {"node-0", "node-2"}
    assert EngineNodes(Replicas(mixed)).num == 2  # type: ignore[arg-type]
    assert [one.node_id for one in among([node("a", OWN), node("b", OTHER)])] == ["a"]


def test_another_population_takes_what_its_own_cannot_take():
    mixed = {"node-0": OWN, "node-1": OTHER}
    assert chosen(mixed, last=("node-0",)) == chosen(mixed, without=("replica-0",)) == {"node-1"}
    assert [one.node_id for one in among([node("a", OTHER), node("b", FOREIGN)])] == ["a"]


def test_a_population_that_reads_messages_otherwise_is_never_called():
    mixed = {"node-0": OWN, "node-1": FOREIGN}
    assert chosen(mixed, last=("node-0",)) == {"node-0"}
    with pytest.raises(NoOtherReplica):
        chosen(mixed, without=("replica-0",))
    assert among([node("a", FOREIGN)]) == []


def test_replicas_without_a_statement_count_as_own():
    assert chosen({"node-0": {}, "node-1": OWN}) == {"node-0", "node-1"}


def test_a_key_has_its_home_within_the_population():
    handle: Any = Replicas({"node-0": OWN, "node-1": OTHER, "node-2": OWN})
    peers = IngressPeers(handle, "node-0", "replica-0")
    assert {peers.home_of(key) for key in range(100)} == {"node-0", "node-2"}
    assert peers.is_running("replica-1")


def test_a_new_field_of_a_message_is_another_language_and_other_code_is_not(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("messages")
    monkeypatch.setattr(population.importlib, "import_module", lambda name: module)
    module.Message = make_dataclass("Message", [("a", int)])  # type: ignore[attr-defined]
    before = messages_digest()
    module.LIMIT = 3  # type: ignore[attr-defined]
    assert messages_digest() == before
    module.Message = make_dataclass("Message", [("b", int), ("a", int)])  # type: ignore[attr-defined]
    assert messages_digest() != before


@pytest.mark.parametrize("deployment", [ModelReplica, TextMTP, MLLM, Ingress, SpecPrefillScorer])
def test_a_node_runs_the_class_of_its_own_sources(deployment: Any):
    pickled = dumps(deployment.func_or_class)
    assert len(pickled) < 200, "a name, not the code of the class"
    assert pickle.loads(pickled) is deployment.func_or_class  # noqa: S301


def test_options_are_sent_as_they_were_set_and_a_node_adds_its_own_defaults(monkeypatch: pytest.MonkeyPatch):
    args = AppArgs.model_validate({"engine": {"max_queue": 7}, "http": {"open": True}}).resolved()
    pickled = dumps(args)
    assert pickle.loads(pickled) == args  # noqa: S301
    monkeypatch.setattr(EngineConfig.model_fields["max_running"], "default", 3)
    elsewhere = pickle.loads(pickled)  # noqa: S301
    assert (elsewhere.engine.max_running, elsewhere.engine.max_queue, elsewhere.http.open) == (3, 7, True)


def test_an_option_that_a_node_does_not_have_is_named():
    with pytest.raises(ValueError, match="EngineConfig has no option older in this version"):
        rebuilt(EngineConfig, {"older": 1, "model": "demo"})
