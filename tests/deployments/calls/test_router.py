import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter

from deployments.calls import replica_choice, router
from deployments.calls.replica_choice import NoReplica, NoReplicaYet, pin_to
from deployments.calls.router import NodeRouter

DEPLOYMENT = DeploymentID(name="ModelReplica", app_name="orchard")


class FakeReplica:
    max_ongoing_requests = 4

    def __init__(self, name: str, node_id: str, engine_id: str = ""):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.node_id = node_id
        self.replica_metadata = {"engine_id": engine_id} if engine_id else {}
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


THREE = [("a", "node-0"), ("b", "node-1"), ("c", "node-2")]


def make_router(
    router_class: type[RequestRouter], replicas: list[Any] | None = None, node_id: str = "node-0", **state: Any
) -> Any:
    """Must be called in a running event loop."""
    options: dict[str, Any] = {"self_node_id": node_id} if issubclass(router_class, LocalityMixin) else {}
    router: Any = router_class(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        **options,
    )
    router.initialize_state(**state)
    router.update_replicas([FakeReplica(*args) for args in THREE] if replicas is None else replicas)
    return router


def call(router: Any, session_id: str = "", internal_id: str = "same", is_retry: bool = False) -> "asyncio.Task[Any]":
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, session_id=session_id)
    pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
    return asyncio.ensure_future(router._choose_replica_for_request(pending, is_retry=is_retry))


async def stop(router: Any) -> None:
    for task in list(router._routing_tasks):
        task.cancel()
    await asyncio.gather(*router._routing_tasks, return_exceptions=True)


def test_concurrent_pinned_calls_of_a_request_do_not_starve():
    async def go() -> list[str]:
        router = make_router(NodeRouter)
        calls = [call(router, f"node:node-{i}") for i in range(3)]
        async with asyncio.timeout(60):
            return [replica.node_id for replica in await asyncio.gather(*calls)]

    assert asyncio.run(go()) == ["node-0", "node-1", "node-2"]


class PlainRouter(RequestRouter):
    async def choose_replicas(self, candidate_replicas: list, pending_request: Any = None) -> list:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]


def test_plain_ray_router_still_lets_concurrent_calls_starve():
    """If it does not, there is one reason less for NodeRouter to let each request choose by itself."""

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


def test_request_pinned_to_a_node_waits_for_its_replica():
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")])
        waiting = call(router, "node:node-9")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        router.update_replicas([FakeReplica("a", "node-0"), FakeReplica("z", "node-9")])
        return (await asyncio.wait_for(waiting, 5)).node_id

    assert asyncio.run(go()) == "node-9"


def test_calls_without_a_node_stay_on_the_node_of_the_caller():
    async def go() -> set[str]:
        router = make_router(NodeRouter, node_id="node-2")
        return {replica.node_id for replica in await asyncio.gather(*[call(router, "", f"id-{i}") for i in range(30)])}

    assert asyncio.run(go()) == {"node-2"}


def test_calls_without_a_node_go_to_all_others_where_the_caller_has_no_replica():
    async def go() -> set[str]:
        router = make_router(NodeRouter, node_id="node-9")
        return {replica.node_id for replica in await asyncio.gather(*[call(router, "", f"id-{i}") for i in range(99)])}

    assert asyncio.run(go()) == {"node-0", "node-1", "node-2"}


def test_call_that_a_full_replica_refuses_is_sent_again_after_a_moment():
    async def go() -> float:
        router = make_router(NodeRouter)
        began = time.monotonic()
        assert (await call(router, "node:node-1", is_retry=True)).node_id == "node-1"
        return time.monotonic() - began

    assert asyncio.run(go()) >= router.FULL_WAIT_S


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_requests_waiting_for_a_node_without_replica_do_not_block_other_requests(num_replicas: int):
    async def go() -> set[str]:
        router = make_router(NodeRouter, [FakeReplica(*args) for args in THREE[:num_replicas]])
        waiting = [call(router, pin_to("gone", 600), f"pinned-{i}") for i in range(20 * num_replicas)]
        await asyncio.sleep(0.05)
        served = [call(router, "", f"id-{i}") for i in range(20)] + [call(router, "node:node-0") for _ in range(20)]
        async with asyncio.timeout(60):
            nodes = {replica.node_id for replica in await asyncio.gather(*served)}
        assert not any(task.done() for task in waiting)
        assert router.num_pending_requests == 0, "no queue grows behind those that wait"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return nodes

    assert asyncio.run(go()) <= {"node-0", "node-1"}


def test_requests_pinned_to_a_node_without_replica_time_out_concurrently():
    async def go() -> tuple[list[Any], float]:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")])
        began = time.monotonic()
        async with asyncio.timeout(60):
            failed = await asyncio.gather(
                *[call(router, pin_to("gone", 0.5), f"id-{i}") for i in range(100)], return_exceptions=True
            )
        return failed, time.monotonic() - began

    failed, took_s = asyncio.run(go())
    assert {type(error) for error in failed} == {NoReplica}
    assert str(failed[0]) == "node gone has had no replica of ModelReplica for 0.5 s"
    assert took_s < 40, "not one after the other"


def test_pinned_request_waits_for_a_replica_up_to_its_own_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_choice, "PIN_WAIT_S", 0.05)

    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")])
        patient = call(router, pin_to("node-9", 30))
        with pytest.raises(NoReplica, match=r"for 0\.05 s"):
            await call(router, pin_to("node-9"))
        assert not patient.done()
        router.update_replicas([FakeReplica("a", "node-0"), FakeReplica("z", "node-9")])
        return (await asyncio.wait_for(patient, 5)).node_id

    assert asyncio.run(go()) == "node-9"


def test_requests_before_the_first_replica_fail_at_once():
    async def go() -> None:
        router = make_router(NodeRouter, [], first_wait_s=0.0)
        for session_id in ("", "node:node-0"):
            with pytest.raises(NoReplicaYet, match="no replica of ModelReplica has been running yet"):
                async with asyncio.timeout(1):
                    await call(router, session_id)

    asyncio.run(go())


def test_new_router_waits_a_moment_for_its_first_replicas():
    async def go() -> str:
        router = make_router(NodeRouter, [], first_wait_s=30.0)
        waiting = call(router)
        await asyncio.sleep(0.05)
        router.update_replicas([FakeReplica("a", "node-0")])
        return (await asyncio.wait_for(waiting, 5)).node_id

    assert asyncio.run(go()) == "node-0"


def test_request_waits_while_replicas_are_replaced():
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")], first_wait_s=0.0)
        router.update_replicas([])
        waiting = call(router)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        router.update_replicas([FakeReplica("b", "node-0")])
        return (await asyncio.wait_for(waiting, 5)).replica_id.unique_id

    assert asyncio.run(go()) == "b"


PICKLED = """
import sys
from ray.serve.config import RequestRouterConfig
config = RequestRouterConfig(request_router_class="deployments.calls.router.NodeRouter")
sys.stdout.write(config._serialized_request_router_cls.hex())
"""


def test_router_pickled_by_serve_works_with_pins_and_errors_of_its_callers():
    """Serve pickles the router's module by value, so that its classes are copies in the processes that use it."""
    command = [sys.executable, "-W", "ignore", "-c", PICKLED]
    root = Path(__file__).parents[2]
    pickled = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    theirs = cloudpickle.loads(bytes.fromhex(pickled))
    assert theirs is not NodeRouter

    async def go() -> None:
        router = make_router(theirs, [FakeReplica("a", "node-a"), FakeReplica("b", "node-b")])
        assert {(await call(router, pin_to("node-b"))).node_id for _ in range(4)} == {"node-b"}
        with pytest.raises(NoReplica):
            await call(router, pin_to("node-c", 0.0))
        with pytest.raises(NoReplicaYet):
            await call(make_router(theirs, [], first_wait_s=0.0))

    asyncio.run(go())


def test_pinned_request_goes_to_the_engine_with_that_id_and_others_to_any_engine_of_the_nearest_node():
    async def go() -> None:
        engines = [("a", "node-0", "node-0:0"), ("b", "node-0", "node-0:1"), ("c", "node-1", "node-1")]
        router = make_router(NodeRouter, [FakeReplica(*args) for args in engines])
        for name, _, engine_id in engines:
            assert (await call(router, pin_to(engine_id))).replica_id.unique_id == name
        assert {(await call(router)).replica_id.unique_id for _ in range(30)} == {"a", "b"}
        with pytest.raises(NoReplica):
            await call(router, pin_to("node-0", 0.0))
        await stop(router)

    asyncio.run(go())
