import asyncio
import collections
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from deployments.routing import NodeRouter, by_load

DEPLOYMENT = DeploymentID(name="ModelReplica", app_name="orchard")


class FakeReplica:
    max_ongoing_requests = 4

    def __init__(self, name: str, node_id: str, queue_len: int = 0):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.node_id = node_id
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()
        self.queue_len = queue_len

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(0.01)
        return self.queue_len


THREE = [("a", "node-0"), ("b", "node-1"), ("c", "node-2")]


def make_router(
    router_class: type[RequestRouter], replicas: list[Any] | None = None, node_id: str = "node-0", **state: Any
) -> Any:
    """Must be called in a running event loop."""
    options: dict[str, Any] = {"self_node_id": node_id} if issubclass(router_class, NodeRouter) else {}
    router: Any = router_class(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        **options,
    )
    router.initialize_state(**state)
    router.update_replicas([FakeReplica(*args) for args in THREE] if replicas is None else replicas)
    return router


def call(router: Any, session_id: str = "", internal_id: str = "same") -> "asyncio.Task[Any]":
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, session_id=session_id)
    pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
    return asyncio.ensure_future(router._choose_replica_for_request(pending))


async def stop(router: Any) -> None:
    for task in list(router._routing_tasks):
        task.cancel()
    await asyncio.gather(*router._routing_tasks, return_exceptions=True)


def test_three_concurrent_calls_of_one_request_do_not_starve():
    async def go() -> list[str]:
        router = make_router(NodeRouter)
        calls = [call(router, f"node:node-{i}") for i in range(3)]
        async with asyncio.timeout(5):
            return [replica.node_id for replica in await asyncio.gather(*calls)]

    assert asyncio.run(go()) == ["node-0", "node-1", "node-2"]


class PlainRouter(RequestRouter):
    async def choose_replicas(self, candidate_replicas: list, pending_request: Any = None) -> list:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]


def test_ray_itself_still_lets_concurrent_calls_starve():
    """If it does not, NodeRouter._fulfill_next_pending_request has done its duty and can go."""

    async def go() -> None:
        router = make_router(PlainRouter)
        calls = [call(router) for _ in range(3)]
        try:
            async with asyncio.timeout(0.5):
                await asyncio.gather(*calls)
        finally:
            await stop(router)

    with pytest.raises(TimeoutError):
        asyncio.run(go())


@pytest.mark.parametrize("local_default", [True, False])
def test_a_named_node_is_kept_to_even_when_another_is_idle(local_default: bool):
    async def go() -> set[str]:
        busy = FakeReplica("b", "node-1", queue_len=3)
        router = make_router(NodeRouter, [FakeReplica("a", "node-0"), busy], local_default=local_default)
        calls = [call(router, "node:node-1", f"id-{i}") for i in range(50)]
        return {replica.node_id for replica in await asyncio.gather(*calls)}

    assert asyncio.run(go()) == {"node-1"}


def test_a_named_node_without_a_replica_is_waited_for():
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")])
        waiting = call(router, "node:node-9")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        router.update_replicas([FakeReplica("a", "node-0"), FakeReplica("z", "node-9")])
        return (await asyncio.wait_for(waiting, 5)).node_id

    assert asyncio.run(go()) == "node-9"


def test_planners_stay_on_the_callers_node():
    async def go() -> set[str]:
        router = make_router(NodeRouter, node_id="node-2", local_default=True)
        return {replica.node_id for replica in await asyncio.gather(*[call(router, "", f"id-{i}") for i in range(30)])}

    assert asyncio.run(go()) == {"node-2"}


def test_a_scorer_on_the_callers_node_comes_first_even_when_another_has_less_to_do():
    async def go() -> str:
        replicas = [FakeReplica("a", "node-0", 0), FakeReplica("b", "node-1", 3)]
        router = make_router(NodeRouter, replicas, "node-1", local_first=True)
        await asyncio.sleep(0.1)  # the router asks new replicas for their load
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-1"


@pytest.mark.parametrize(
    "replicas", [[("a", "node-0", 2), ("b", "node-1", 1)], [("b", "node-1", 1), ("c", "node-2", 4)]]
)
def test_without_a_scorer_of_its_own_that_has_room_a_node_goes_to_the_least_loaded(replicas: list):
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica(*args) for args in replicas], "node-2", local_first=True)
        await asyncio.sleep(0.1)
        return (await asyncio.wait_for(call(router), 5)).node_id

    assert asyncio.run(go()) == "node-1"


def test_the_least_loaded_engine_comes_first():
    async def go() -> str:
        loads = {"a": 2, "b": 1, "c": 3}
        replicas = [FakeReplica(name, f"node-{name}", load) for name, load in loads.items()]
        router = make_router(NodeRouter, replicas)
        await asyncio.sleep(0.1)  # the router asks new replicas for their load
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-b"


def test_equal_engines_share_requests_evenly_and_a_key_always_picks_the_same():
    replicas: list[Any] = [FakeReplica(*args) for args in THREE]
    loads = {replica.replica_id: 0 for replica in replicas}
    first = collections.Counter(by_load(replicas, loads, f"key-{i}")[0].node_id for i in range(600))
    assert len(first) == 3 and all(150 < count < 250 for count in first.values()), first
    assert by_load(replicas[::-1], loads, "key") == by_load(replicas, loads, "key")
