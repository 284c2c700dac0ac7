"""One of each per node; a request is planned where it is answered; nodes that come and go are followed."""

import asyncio
from typing import Any

import pytest
import ray

from deployments.dispatch.engine_client import EngineClient
from deployments.requests import ChatRequest, Route
from engine.protocol import FinishReason
from tests.e2e.pictures import about, image_part, shape

pytestmark = [pytest.mark.cluster, pytest.mark.night("test_partition.py keeps all but an added node")]

QUESTION = ({"role": "user", "content": "What is 12 + 30?"},)
LONG: dict[str, Any] = {"max_tokens": 400, "min_tokens": 400}
"""An answer that lasts for seconds, however fast the machine is."""


def client(cluster: Any) -> EngineClient:
    planners = {Route.TEXT: cluster.handle("TextMTP"), Route.MLLM: cluster.handle("MLLM")}
    return EngineClient(cluster.handle("ModelReplica"), planners)


def ask(cluster: Any, requests: list[tuple[ChatRequest, Route]], concurrency: int = 8) -> list[tuple[str, str, Any]]:
    """Node of the planner, node of the engine and all token ids, of each request."""

    async def go() -> list[tuple[str, str, Any]]:
        engine, free = client(cluster), asyncio.Semaphore(concurrency)

        async def one(request: ChatRequest, route: Route) -> tuple[str, str, Any]:
            async with free:
                stream = await engine.start(request, route)
                tokens = [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]
                return stream.plan.planner_node, stream.node_id, tuple(tokens)

        async with asyncio.timeout(240):
            return await asyncio.gather(*[one(*request) for request in requests])

    return asyncio.run(go())


def questions(name: str, count: int) -> list[tuple[ChatRequest, Route]]:
    return [(ChatRequest(f"{name}-{i}", QUESTION, temperature=0), Route.TEXT) for i in range(count)]


def test_each_deployment_has_one_replica_on_each_node(cluster: Any):
    nodes = cluster.living_nodes()
    assert len(nodes) == 3
    for deployment in ("ModelReplica", "TextMTP", "MLLM", "Ingress"):
        assert cluster.nodes(deployment) == nodes, deployment
    for deployment in ("TextMTP", "MLLM", "Ingress"):
        assert not any(replica["has_mlx"] for replica in cluster.replicas(deployment)), deployment


def test_status_of_an_ingress_shows_the_ingress_of_every_node(cluster: Any):
    ingress = cluster.handle("Ingress")
    shown = ingress.status.remote().result(timeout_s=30)["ingress"]
    assert sorted(replica["node_id"] for replica in shown) == cluster.living_nodes()
    assert ingress.cancel.remote("never sent").result(timeout_s=30) is False, "all have said that they do not know it"


def test_a_hundred_requests_are_planned_where_they_are_answered(cluster: Any):
    picture = tuple(about("What is in the image?", image_part(shape("red", "circle"))))
    requests = questions("local", 70)
    requests += [(ChatRequest(f"seen-{i}", picture, temperature=0), Route.MLLM) for i in range(30)]
    answers = ask(cluster, requests)
    assert [planner for planner, _, _ in answers] == [engine for _, engine, _ in answers]
    assert {node for _, node, _ in answers} == set(cluster.living_nodes())
    assert len({tokens for _, _, tokens in answers[:70]}) == 1, "every node gives the same answer"
    assert len({tokens for _, _, tokens in answers[70:]}) == 1


def test_streams_of_a_lost_node_go_on_at_others_and_an_added_node_gets_requests(cluster: Any):
    async def while_a_node_dies() -> tuple[str, list[Any], list[FinishReason | None]]:
        engine = client(cluster)
        requests = [ChatRequest(f"long-{i}", QUESTION, temperature=0, **LONG) for i in range(9)]
        streams = await asyncio.gather(*[engine.start(request, Route.TEXT) for request in requests])
        dead = next(stream.node_id for stream in streams if stream.node_id in pids)
        await asyncio.to_thread(cluster.kill_worker, dead, pids[dead])

        async def end_of(stream: Any) -> FinishReason | None:
            return [chunk async for chunk in stream][-1].finish_reason

        async with asyncio.timeout(120):
            return dead, streams, await asyncio.gather(*map(end_of, streams))

    pids = cluster.worker_pids()
    dead, streams, reasons = asyncio.run(while_a_node_dies())
    assert set(reasons) == {FinishReason.LENGTH}
    moved = [stream for stream in streams if stream.num_moves]
    assert moved and all(stream.node_id != dead for stream in moved)

    cluster.wait_settled(2)
    assert {engine for _, engine, _ in ask(cluster, questions("two", 20))} == set(cluster.living_nodes())

    added = cluster.add_worker()
    cluster.wait_settled(3)
    answers = ask(cluster, questions("three", 40))
    assert added in {engine for _, engine, _ in answers}
    assert all(planner == engine for planner, engine, _ in answers)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 3
