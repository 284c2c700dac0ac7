import asyncio
import collections
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter

from deployments import routing
from deployments.replica_choice import Choice, NoOtherReplica, NoReplica, NoReplicaYet, pin_to
from deployments.routing import BoundedReplica, NodeRouter, by_load

DEPLOYMENT = DeploymentID(name="ModelReplica", app_name="orchard")


class FakeReplica:
    max_ongoing_requests = 4

    def __init__(self, name: str, node_id: str, queue_len: int = 0):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.node_id = node_id
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()
        self.queue_len = queue_len

        self.num_probes = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        await asyncio.sleep(0.01)
        return self.queue_len


class SilentReplica(FakeReplica):
    """One on a node that was cut off."""

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        await asyncio.sleep(60)
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


def call(router: Any, session_id: str = "", internal_id: str = "same", **kwargs: Any) -> "asyncio.Task[Any]":
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, session_id=session_id)
    pending = PendingRequest(args=[], kwargs=kwargs, metadata=metadata)
    return asyncio.ensure_future(router._choose_replica_for_request(pending))


async def stop(router: Any) -> None:
    for task in list(router._routing_tasks):
        task.cancel()
    await asyncio.gather(*router._routing_tasks, return_exceptions=True)


def test_concurrent_pinned_calls_of_a_request_do_not_starve():
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


@pytest.mark.parametrize("local_default", [True, False])
def test_request_pinned_to_a_busy_node_stays_on_the_node(local_default: bool):
    async def go() -> set[str]:
        busy = FakeReplica("b", "node-1", queue_len=3)
        router = make_router(NodeRouter, [FakeReplica("a", "node-0"), busy], local_default=local_default)
        calls = [call(router, "node:node-1", f"id-{i}") for i in range(50)]
        return {replica.node_id for replica in await asyncio.gather(*calls)}

    assert asyncio.run(go()) == {"node-1"}


def test_request_pinned_to_a_node_waits_for_its_replica():
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0")])
        waiting = call(router, "node:node-9")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        router.update_replicas([FakeReplica("a", "node-0"), FakeReplica("z", "node-9")])
        return (await asyncio.wait_for(waiting, 5)).node_id

    assert asyncio.run(go()) == "node-9"


def test_requests_to_planners_stay_on_the_node_of_the_caller():
    async def go() -> set[str]:
        router = make_router(NodeRouter, node_id="node-2", local_default=True)
        return {replica.node_id for replica in await asyncio.gather(*[call(router, "", f"id-{i}") for i in range(30)])}

    assert asyncio.run(go()) == {"node-2"}


def test_local_scorer_is_preferred_to_a_less_loaded_scorer():
    async def go() -> str:
        replicas = [FakeReplica("a", "node-0", 0), FakeReplica("b", "node-1", 3)]
        router = make_router(NodeRouter, replicas, "node-1", local_first=True)
        await asyncio.sleep(0.1)  # the router asks new replicas for their load
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-1"


@pytest.mark.parametrize(
    "replicas", [[("a", "node-0", 2), ("b", "node-1", 1)], [("b", "node-1", 1), ("c", "node-2", 4)]]
)
def test_least_loaded_scorer_is_chosen_without_a_local_scorer_with_free_slots(replicas: list):
    async def go() -> str:
        router = make_router(NodeRouter, [FakeReplica(*args) for args in replicas], "node-2", local_first=True)
        await asyncio.sleep(0.1)
        return (await asyncio.wait_for(call(router), 5)).node_id

    assert asyncio.run(go()) == "node-1"


def test_least_loaded_engine_is_chosen():
    async def go() -> str:
        loads = {"a": 2, "b": 1, "c": 3}
        replicas = [FakeReplica(name, f"node-{name}", load) for name, load in loads.items()]
        router = make_router(NodeRouter, replicas)
        await asyncio.sleep(0.1)  # the router asks new replicas for their load
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-b"


def test_simultaneous_requests_are_spread_before_any_replica_reports_its_load():
    async def go() -> collections.Counter[str]:
        router = make_router(NodeRouter)
        await asyncio.sleep(0.1)
        chosen = await asyncio.gather(*(call(router, internal_id=f"request-{i}") for i in range(6)))
        return collections.Counter(replica.node_id for replica in chosen)

    assert asyncio.run(go()) == {"node-0": 2, "node-1": 2, "node-2": 2}


def test_equally_loaded_engines_share_requests_evenly_and_consistently_by_key():
    replicas: list[Any] = [FakeReplica(*args) for args in THREE]
    loads = {replica.replica_id: 0 for replica in replicas}
    first = collections.Counter(by_load(replicas, loads, f"key-{i}")[0].node_id for i in range(600))
    assert len(first) == 3 and all(150 < count < 250 for count in first.values()), first
    assert by_load(replicas[::-1], loads, "key") == by_load(replicas, loads, "key")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_requests_waiting_for_a_node_without_replica_do_not_block_other_requests(num_replicas: int):
    async def go() -> set[str]:
        router = make_router(NodeRouter, [FakeReplica(*args) for args in THREE[:num_replicas]])
        waiting = [call(router, pin_to("gone", 60), f"pinned-{i}") for i in range(20 * num_replicas)]
        await asyncio.sleep(0.05)
        served = [call(router, "", f"id-{i}") for i in range(20)] + [call(router, "node:node-0") for _ in range(20)]
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(10):
            failed = await asyncio.gather(
                *[call(router, pin_to("gone", 0.5), f"id-{i}") for i in range(100)], return_exceptions=True
            )
        return failed, time.monotonic() - began

    failed, took_s = asyncio.run(go())
    assert {type(error) for error in failed} == {NoReplica}
    assert str(failed[0]) == "node gone has had no replica of ModelReplica for 0.5 s"
    assert took_s < 5, "not one after the other"


def test_pinned_request_waits_for_a_replica_up_to_its_own_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "PIN_WAIT_S", 0.05)

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


def test_excluded_replica_is_not_chosen_and_waiting_for_another_replica_is_optional():
    async def go() -> None:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0", 0), FakeReplica("b", "node-1", 3)])
        assert (await call(router, choice=Choice(frozenset("a")))).node_id == "node-1"
        with pytest.raises(NoOtherReplica):
            await call(router, choice=Choice(frozenset("ab"), waits=False))
        waiting = call(router, choice=Choice(frozenset("ab")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        router.update_replicas([FakeReplica("c", "node-0")])
        assert (await asyncio.wait_for(waiting, 5)).replica_id.unique_id == "c"

    asyncio.run(go())


def test_replica_marked_as_last_is_chosen_last_despite_the_least_load():
    async def go() -> list[str]:
        router = make_router(NodeRouter, [FakeReplica("a", "node-0", 0), FakeReplica("b", "node-1", 3)])
        chosen = [await call(router, choice=Choice(last=frozenset(last))) for last in ("", "a", "ab")]
        return [replica.node_id for replica in chosen]

    assert asyncio.run(go()) == ["node-0", "node-1", "node-0"]


def test_replica_with_unknown_load_is_chosen_last_and_does_not_delay_requests():
    async def go() -> None:
        silent = SilentReplica("silent", "node-9")
        router = make_router(NodeRouter, [silent, FakeReplica("a", "node-0", 3)])
        router.queue_len_response_deadline_s = router.max_queue_len_response_deadline_s = 0.3
        await asyncio.sleep(0.7)  # it has been asked, and has not answered
        began = time.monotonic()
        chosen = set()
        for i in range(50):
            replica = await call(router, "", f"id-{i}")
            chosen.add(replica.node_id)
            router.on_new_queue_len_info(replica.replica_id, replica.queue_len)  # as with the reservation of a slot
        assert chosen == {"node-0"} and time.monotonic() - began < 5
        assert silent.num_probes <= 5, "it is asked once at a time, and not once for each request"

    asyncio.run(go())


def test_idle_replica_with_a_stale_load_is_probed_before_a_busy_replica_is_chosen():
    async def go() -> str:
        idle, busy = FakeReplica("idle", "node-0", 0), FakeReplica("busy", "node-1", 3)
        router = make_router(NodeRouter, [idle, busy])
        await asyncio.sleep(0.1)
        router.replica_queue_len_cache.invalidate_key(idle.replica_id)
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-0"


def test_load_that_was_reported_long_ago_is_probed_again_before_replicas_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Requests of other nodes have ended since; the replica was not chosen, so it has not reported that."""
    monkeypatch.setattr(routing, "LOAD_AGE_S", 0.05)

    async def go() -> str:
        idle, busy = FakeReplica("idle", "node-0", 0), FakeReplica("busy", "node-1", 2)
        router = make_router(NodeRouter, [idle, busy])
        await asyncio.sleep(0.1)
        router.on_new_queue_len_info(idle.replica_id, 3)
        await asyncio.sleep(0.1)
        return (await call(router)).node_id

    assert asyncio.run(go()) == "node-0"


def test_requests_waiting_for_a_full_replica_share_probes_of_its_load():
    async def go() -> tuple[int, int]:
        full = FakeReplica("a", "node-0", queue_len=4)
        router = make_router(NodeRouter, [full])
        waiting = [call(router, "", f"id-{i}") for i in range(200)]
        await asyncio.sleep(1)
        num_probes, full.queue_len = full.num_probes, 0
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting)
        return num_probes, len(waiting)

    num_probes, num_waiting = asyncio.run(go())
    assert 1 < num_probes < num_waiting / 4


class Unreachable:
    """A replica's actor that answers nothing. sent: the methods that were called."""

    _actor_id = SimpleNamespace(binary=lambda: b"i" * 16)

    def __init__(self) -> None:
        self.sent: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> "asyncio.Future[Any]":
            self.sent.append(method)
            return asyncio.get_running_loop().create_future()

        return SimpleNamespace(remote=remote)


def test_reservation_and_release_at_an_unreachable_replica_time_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "SLOT_TIMEOUT_S", 0.05)
    cancelled: list[Any] = []
    monkeypatch.setattr("ray.cancel", cancelled.append)
    actor: Any = Unreachable()

    async def go() -> None:
        replica = BoundedReplica.__new__(BoundedReplica)
        replica._replica_info = SimpleNamespace(is_cross_language=False, replica_id="a")  # type: ignore[assignment]
        replica._actor_handle = actor
        with pytest.raises(ActorUnavailableError, match=r"no slot of a was reserved within 0\.05 s"):
            await replica.reserve_slot(RequestMetadata(request_id="r", internal_request_id="i"))
        with pytest.raises(TimeoutError):
            await replica.release_slot("token")

    asyncio.run(go())
    assert actor.sent == ["reserve_slot", "release_slot", "release_slot"] and len(cancelled) == 1


def test_router_creates_bounded_replicas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedReplica, "__init__", lambda self, info: None)

    async def go() -> type:
        return type(make_router(NodeRouter).create_replica_wrapper(SimpleNamespace()))

    assert asyncio.run(go()) is BoundedReplica


PICKLED = """
import sys
from ray.serve.config import RequestRouterConfig
config = RequestRouterConfig(request_router_class="deployments.routing.NodeRouter")
sys.stdout.write(config._serialized_request_router_cls.hex())
"""


def test_router_pickled_by_serve_works_with_choices_and_errors_of_its_callers():
    """Serve pickles the router's module by value, so that its classes are copies in the processes that use it."""
    command = [sys.executable, "-W", "ignore", "-c", PICKLED]
    root = Path(__file__).parents[2]
    pickled = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    theirs = cloudpickle.loads(bytes.fromhex(pickled))
    assert theirs is not NodeRouter

    async def go() -> None:
        router = make_router(theirs, [FakeReplica("a", "node-a"), FakeReplica("b", "node-b")])
        excluded = Choice(frozenset({"a"}))
        assert {(await call(router, choice=excluded)).node_id for _ in range(4)} == {"node-b"}
        with pytest.raises(NoOtherReplica):
            await call(router, choice=Choice(frozenset({"a", "b"}), waits=False))
        with pytest.raises(NoReplicaYet):
            await call(make_router(theirs, [], first_wait_s=0.0))

    asyncio.run(go())
