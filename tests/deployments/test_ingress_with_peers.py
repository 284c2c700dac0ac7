"""One ingress among others: cancelling across ingresses, capacity, status and shutdown."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import ingress
from deployments.args import AppArgs
from deployments.calls.cached_call import CachedCall
from deployments.http.in_flight import InFlightRequest
from deployments.ingress import Ingress
from deployments.requests import ChatRequest, EngineAnswer
from deployments.status import graph_status
from engine.config import EngineConfig
from engine.errors import EngineFailed, Overloaded, Unavailable
from engine.placement import TakenOver
from engine.processing.checkpoint import DEMO_MODEL
from tests.deployments import fake_handle
from tests.deployments.fake_handle import FakeCall, FakeHandle

ORCHARD = DeploymentID(name="Ingress", app_name="orchard")


SILENT = 60.0


class Replicas(FakeHandle):
    """A handle to all replicas of a deployment. says: their outcomes, or an error instead of all their answers."""

    def __init__(self, says: Sequence[Any] | Exception):
        self._says = says
        self.asked: list[tuple[Any, ...]] = []

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        return super().broadcast(method, *arguments)

    async def results(self, method: str, *arguments: Any) -> list[Any]:
        if isinstance(self._says, Exception):
            raise self._says
        return [FakeCall(says) for says in self._says]


INGRESS: Any = Ingress.func_or_class


class Replica(INGRESS):
    async def __init__(self, *arguments: Any):
        await super().__init__(*arguments)

    def __del__(self) -> None:
        """Stands for the ingress's own, which Serve awaits and these tests do not."""


async def make_ingress(
    monkeypatch: pytest.MonkeyPatch, ingresses: Replicas | None = None, handle: Any = None, **engine: Any
) -> Any:
    monkeypatch.setattr(ingress, "own_deployment", lambda: ingresses)
    monkeypatch.setattr(ingress, "replica_info", lambda: {"replica_id": "here"})
    for module in (ingress, graph_status):
        monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.1)
    replica: Any = Replica.__new__(Replica)
    handle = handle or FakeHandle()
    arguments = (AppArgs(engine=EngineConfig(**engine), drain_timeout_s=0.05), {}, handle, handle, handle)
    await replica.__init__(*arguments)
    return replica


@contextmanager
def running(here: Any, num_choices: int = 1) -> Iterator[InFlightRequest]:
    """A request with the id `mine`."""
    with here.in_flight.enter("mine") as entry:
        here.in_flight.set_choices(entry, "completion", num_choices)
        yield entry


@pytest.mark.parametrize(
    ("says", "found"),
    [([False, True], True), ([False, True, SILENT], True), ([False, ActorDiedError(), True], True), ([False], False)],
)
def test_request_of_another_ingress_is_cancelled_there(says: list[Any], found: bool, monkeypatch: pytest.MonkeyPatch):
    ingresses = Replicas(says)

    async def go() -> bool:
        return await (await make_ingress(monkeypatch, ingresses)).cancel("mine")

    assert asyncio.run(go()) is found
    assert ingresses.asked == [("cancel_here", "mine")]


@pytest.mark.parametrize("says", [[False], [True], [SILENT], TimeoutError()])
def test_local_request_is_cancelled_and_the_cancel_is_sent_to_all_ingresses(
    says: list[Any] | Exception, monkeypatch: pytest.MonkeyPatch
):
    ingresses = Replicas(says)

    async def go() -> tuple[bool, bool]:
        here = await make_ingress(monkeypatch, ingresses)
        with here.in_flight.enter("mine") as entry:
            return await here.cancel("mine"), entry.cancelled.done()

    assert asyncio.run(go()) == (True, True)
    assert ingresses.asked == [("cancel_here", "mine")]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ([False, False, SILENT], "1 of 3 ingresses"),
        ([False, ActorDiedError(), SILENT], "2 of 3 ingresses"),
        ([False, asyncio.CancelledError()], "1 of 2 ingresses"),
        ([], "1 of 1 ingresses"),
        (TimeoutError(), "1 of 1 ingresses"),
        (DeploymentUnavailableError(ORCHARD), "1 of 1 ingresses"),
    ],
)
def test_cancel_of_a_request_found_nowhere_is_unavailable_while_an_ingress_is_silent(
    says: Any, told: str, monkeypatch: pytest.MonkeyPatch
):
    async def go() -> None:
        await (await make_ingress(monkeypatch, Replicas(says))).cancel("mine")

    with pytest.raises(Unavailable, match=f"{told} that may have the request did not answer"):
        asyncio.run(go())


def test_cancel_here_ends_only_a_known_local_request(monkeypatch: pytest.MonkeyPatch):
    async def go() -> tuple[bool, bool]:
        here = await make_ingress(monkeypatch)
        with here.in_flight.enter("mine"):
            return await here.cancel_here("mine"), await here.cancel_here("theirs")

    assert asyncio.run(go()) == (True, False)


def test_status_shows_every_answering_ingress_and_the_local_ingress_first(monkeypatch: pytest.MonkeyPatch):
    there = {"replica_id": "there", "num_in_flight": 5, "num_refused": 6, "is_draining": True}
    stale = {"replica_id": "here", "num_in_flight": 9, "num_refused": 9, "is_draining": True}
    monkeypatch.setattr(graph_status, "status_of_all", no_replicas)

    async def go() -> Any:
        here = await make_ingress(monkeypatch, Replicas([SILENT, there, stale, TimeoutError()]))
        with running(here, 3):
            return (await here.status())["ingress"]

    own = {"replica_id": "here", "num_in_flight": 3, "num_refused": 0, "is_draining": False}
    assert asyncio.run(go()) == [own, there]


async def no_replicas(handle: Any) -> list[Any]:
    return []


def engine(state: str, error: str | None = None) -> dict[str, Any]:
    return {"engine": {"state": state, "error": error}}


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ([SILENT, engine("ready")], None),
        ([engine("failed", "it broke"), engine("ready")], None),
        ([ActorDiedError(), SILENT, engine("failed", "it broke")], "it broke"),
        ([engine("stopped")], "No engine is ready: the model is being loaded."),
        ([SILENT], "No engine is ready: the model is being loaded."),
        (DeploymentUnavailableError(ORCHARD), "No engine is ready: the model is being loaded."),
    ],
)
def test_server_is_ready_with_a_single_ready_engine(says: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch):
    async def go() -> Any:
        here = await make_ingress(monkeypatch)
        here._graph._replicas["engines"] = Replicas(says)
        return await here.not_ready()

    assert asyncio.run(go()) == reason


@pytest.mark.parametrize("says", [[], [SILENT], DeploymentUnavailableError(ORCHARD)])
def test_server_is_ready_only_when_images_can_be_planned_unless_the_model_reads_none(
    says: Any, monkeypatch: pytest.MonkeyPatch
):
    async def go(model: str) -> Any:
        here = await make_ingress(monkeypatch, model=model)
        here._graph._replicas.update(engines=Replicas([engine("ready")]), mllm=Replicas(says))
        assert await here.not_ready() is None, "texts are answered"
        return await here.not_started()

    assert asyncio.run(go("demo")) == "Images cannot be read yet: their planner is being started."
    assert asyncio.run(go(str(DEMO_MODEL / "draft"))) is None


def test_server_that_has_started_stays_ready_while_its_image_planner_is_replaced(monkeypatch: pytest.MonkeyPatch):
    async def go() -> list[str | None]:
        here = await make_ingress(monkeypatch)
        here._graph._replicas.update(engines=Replicas([engine("ready")]), mllm=Replicas([{"images": {}}]))
        reasons = [await here.not_started()]
        here._graph._replicas["mllm"] = Replicas([])
        reasons.append(await here.not_started())
        here._graph._replicas["engines"] = Replicas([engine("failed", "it broke")])
        here._graph._ready_until = float("-inf")
        here._graph._readiness = CachedCall(here._graph._ask_readiness, 0.0)
        return [*reasons, await here.not_started()]

    assert asyncio.run(go()) == [None, None, "it broke"]


def test_readiness_does_not_wait_for_a_silent_engine_while_another_engine_is_ready(monkeypatch: pytest.MonkeyPatch):
    async def go() -> float:
        here = await make_ingress(monkeypatch)
        monkeypatch.setattr(graph_status, "STATUS_TIMEOUT_S", SILENT)
        here._graph._replicas["engines"] = Replicas([SILENT, engine("ready")])
        began = time.monotonic()
        assert await here.not_ready() is None
        return time.monotonic() - began

    assert asyncio.run(go()) < SILENT / 4


def test_concurrent_status_and_readiness_calls_share_a_query_to_the_replicas(monkeypatch: pytest.MonkeyPatch):
    async def go() -> None:
        ingresses, engines = Replicas([]), Replicas([engine("failed", "it broke")])
        monkeypatch.setattr(graph_status, "status_of_all", no_replicas)
        here = await make_ingress(monkeypatch, ingresses)
        here._graph._replicas["engines"] = engines
        shown = await asyncio.gather(*[here.status() for _ in range(50)])
        reasons = await asyncio.gather(*[here.not_ready() for _ in range(50)])
        assert len(shown) == 50 and reasons == ["it broke"] * 50
        assert ingresses.asked == [("status_here",)] and engines.asked == [("status",)]
        await asyncio.gather(here.cancel("mine"), here.cancel("mine"), return_exceptions=True)
        assert ingresses.asked.count(("cancel_here", "mine")) == 2, "no cancel is left out"

    asyncio.run(go())


def test_status_is_queried_anew_after_the_start_or_end_of_an_answer(monkeypatch: pytest.MonkeyPatch):
    async def go() -> int:
        ingresses = Replicas([])
        monkeypatch.setattr(graph_status, "status_of_all", no_replicas)
        here = await make_ingress(monkeypatch, ingresses)
        await here.status()

        async def refuse(*request: Any) -> None:
            await here.status()
            raise Overloaded("full", 1.0)

        here._client.start = refuse
        with pytest.raises(Overloaded):
            await here.start(ChatRequest("r", ()), None)
        await here.status()
        await here.status()
        return len(ingresses.asked)

    assert asyncio.run(go()) == 3


def test_status_of_all_replicas_lacks_only_silent_replicas():
    async def go() -> list[dict[str, Any]]:
        handle: Any = Replicas([engine("ready"), SILENT, engine("failed")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_status, "STATUS_TIMEOUT_S", 0.1)
            return await graph_status.status_of_all(handle)

    assert asyncio.run(go()) == [engine("ready"), engine("failed")]


def test_ingress_admits_as_many_choices_as_the_running_engines_run_and_queue(monkeypatch: pytest.MonkeyPatch):
    nodes: list[str] = []

    class Engines(FakeHandle):
        def running(self) -> dict[str, Any]:
            return fake_handle.running(*nodes)

    async def go() -> None:
        here = await make_ingress(monkeypatch, handle=Engines(), max_running=2, max_queue=3)
        for nodes[:], limit in ((["a"], 5), (["a", "b", "c"], 15), ([], 5)):
            with ExitStack() as entered:
                for _ in range(limit):
                    entered.enter_context(running(here))
                with pytest.raises(Overloaded, match=f"the limit is {limit}"):
                    entered.enter_context(running(here))

    asyncio.run(go())


def test_draining_ingress_is_not_ready_and_ends_answers_after_the_timeout(monkeypatch: pytest.MonkeyPatch):
    async def go() -> None:
        here = await make_ingress(monkeypatch)
        with running(here) as entry:
            draining = asyncio.ensure_future(here.drain())
            error = await entry.cancelled
            assert "did not finish within 0.05 s" in error.message
            assert await here.not_ready() == "The server is shutting down."
        await draining

    asyncio.run(go())


def test_ingress_drains_when_serve_stops_its_replica(monkeypatch: pytest.MonkeyPatch):
    acts: list[Any] = []
    monkeypatch.setattr(ingress, "on_stop", acts.append)

    async def go() -> bool:
        here = await make_ingress(monkeypatch)
        (stop,) = acts
        await stop()
        return here.in_flight.is_draining

    assert asyncio.run(go())


class Engines(FakeHandle):
    """Handles of the engines by id; those in `silent` do not answer, those in `drained` take no requests."""

    def __init__(self, silent: Sequence[str] = (), drained: Sequence[str] = ()):
        self.silent, self.drained = silent, drained
        self.log: list[tuple[str, str]] = []

    def running(self) -> dict[str, Any]:
        return fake_handle.running()

    def call(self, *arguments: Any) -> FakeCall:
        engine_id, method = self.chosen["session_id"].removeprefix("node:"), self.chosen["method_name"]
        self.log.append((method, engine_id))
        if engine_id in self.silent:
            return FakeCall(fake_handle.task_error(EngineFailed("it is loading")))
        return FakeCall(EngineAnswer(engine_id, "", engine_id in self.drained))


async def with_engines(monkeypatch: pytest.MonkeyPatch, engines: Engines, *ids: str) -> tuple[Any, list[Any]]:
    """Return an ingress before these engines, and the list of its hand-overs."""
    here, handed = await make_ingress(monkeypatch, Replicas([]), engines), list[Any]()

    async def all_ids(num_without_resources: int) -> list[str]:
        return list(ids)

    async def leave(drained: list[str], deadline_s: float, without: Sequence[str]) -> TakenOver:
        handed.append((drained, list(without)))
        return TakenOver(3, 2)

    monkeypatch.setattr(ingress, "all_engine_ids", all_ids)
    monkeypatch.setattr(here._client.hand_over, "leave", leave)
    return here, handed


def test_a_node_with_a_silent_engine_hands_over_what_the_others_have_and_names_it(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        engines = Engines(silent=["a:1"])
        here, handed = await with_engines(monkeypatch, engines, "a:0", "a:1", "b")
        with pytest.raises(Unavailable, match=r"a:1 \(it is loading\)\. Drained: a:0\. .*2 of 3 snapshots"):
            await here.drain_node("a", 5.0)
        assert handed == [(["a:0"], ["a:0", "a:1"])] and ("leave", "b") not in engines.log
        with pytest.raises(Unavailable, match=r"a:1 \(it is loading\)"):
            await here.undo_drain("a")
        assert ("come_back", "a:0") in engines.log

    asyncio.run(main())


def test_the_last_engine_that_takes_requests_is_not_drained(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        here, handed = await with_engines(monkeypatch, Engines(drained=["a:0"]), "a:0", "a:1")
        with pytest.raises(Unavailable, match=r"a:1 cannot be drained: all other engines .* \(a:0\)"):
            await here.drain_node("a:1")
        assert str((await here.drain_node("a:0")).num_taken) == "2" and handed == [(["a:0"], ["a:0"])]
        with pytest.raises(Unavailable, match="only node"):
            await here.drain_node("a")

    asyncio.run(main())
