"""One ingress among others: whose requests it cancels, how many it lets in, what it says of itself, how it ends."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import ingress
from deployments.http.config import HttpConfig
from deployments.ingress import Ingress
from engine.config import EngineConfig
from engine.protocol import Overloaded, Unavailable

ORCHARD = DeploymentID(name="Ingress", app_name="orchard")


class Peers:
    """A handle to all ingresses. says: what they answer, or an error instead of all their answers."""

    def __init__(self, says: list[Any] | Exception):
        self._says = says
        self.asked: list[tuple[Any, ...]] = []

    def broadcast(self, *question: Any) -> "Peers":
        self.asked.append(question)
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0 and return_exceptions
        if isinstance(self._says, Exception):
            raise self._says
        return self._says


class Handle:
    """Of a deployment that nobody asks here."""

    def options(self, **options: Any) -> "Handle":
        return self


INGRESS: Any = Ingress.func_or_class


class Replica(INGRESS):
    async def __init__(self, *arguments: Any):
        await super().__init__(*arguments)

    def __del__(self) -> None:
        """Serve awaits the one of the ingress; here nobody does."""


async def make_ingress(monkeypatch: pytest.MonkeyPatch, peers: Peers | None = None, **engine: Any) -> Any:
    monkeypatch.setattr(ingress, "own_deployment", lambda: peers)
    monkeypatch.setattr(ingress, "replica_info", lambda: {"replica_id": "here"})
    replica: Any = Replica.__new__(Replica)
    handle = Handle()
    arguments = ("demo", EngineConfig(**engine), HttpConfig(), {}, handle, handle, handle, None, 120.0, 0.05)
    await replica.__init__(*arguments)
    return replica


@pytest.mark.parametrize(
    ("says", "found"),
    [([False, True], True), ([TimeoutError(), True], True), ([False, False], False), ([], False)],
)
def test_a_request_that_is_not_here_is_cancelled_wherever_it_is(
    says: list[Any], found: bool, monkeypatch: pytest.MonkeyPatch
):
    peers = Peers(says)

    async def go() -> bool:
        return await (await make_ingress(monkeypatch, peers)).cancel("mine")

    assert asyncio.run(go()) is found
    assert peers.asked == [("cancel_here", "mine")]


@pytest.mark.parametrize("says", [[False], [True], [TimeoutError()], TimeoutError()])
def test_a_request_that_is_here_is_cancelled_here_and_wherever_else_it_is(
    says: list[Any] | Exception, monkeypatch: pytest.MonkeyPatch
):
    peers = Peers(says)

    async def go() -> tuple[bool, bool]:
        here = await make_ingress(monkeypatch, peers)
        with here.in_flight.enter(("mine",), 1) as entry:
            return await here.cancel("mine"), entry.must_end.done()

    assert asyncio.run(go()) == (True, True)
    assert peers.asked == [("cancel_here", "mine")]


@pytest.mark.parametrize("says", [[False, ActorDiedError()], TimeoutError(), DeploymentUnavailableError(ORCHARD)])
def test_whether_a_request_is_known_is_not_said_while_somebody_does_not_answer(
    says: Any, monkeypatch: pytest.MonkeyPatch
):
    async def go() -> None:
        await (await make_ingress(monkeypatch, Peers(says))).cancel("mine")

    with pytest.raises(Unavailable, match="did not answer"):
        asyncio.run(go())


def test_a_request_is_cancelled_here_for_whoever_asks(monkeypatch: pytest.MonkeyPatch):
    async def go() -> tuple[bool, bool]:
        here = await make_ingress(monkeypatch)
        with here.in_flight.enter(("mine",), 1):
            return await here.cancel_here("mine"), await here.cancel_here("theirs")

    assert asyncio.run(go()) == (True, False)


def test_the_status_shows_every_ingress_this_one_first(monkeypatch: pytest.MonkeyPatch):
    there = {"replica_id": "there", "num_in_flight": 5, "num_refused": 6, "is_draining": True}
    stale = {"replica_id": "here", "num_in_flight": 9, "num_refused": 9, "is_draining": True}
    monkeypatch.setattr(ingress, "status_of_all", no_replicas)

    async def go() -> Any:
        here = await make_ingress(monkeypatch, Peers([there, stale, TimeoutError()]))
        with here.in_flight.enter(("mine",), 3):
            return (await here.status())["ingress"]

    own = {"replica_id": "here", "num_in_flight": 3, "num_refused": 0, "is_draining": False}
    assert asyncio.run(go()) == [own, there]


async def no_replicas(handle: Any) -> list[Any]:
    return []


def test_an_ingress_lets_in_what_all_engines_run_and_queue(monkeypatch: pytest.MonkeyPatch):
    nodes = ["a"]

    async def known() -> list[str]:
        return list(nodes)

    async def go() -> None:
        monkeypatch.setattr(ingress, "engine_node_ids", known)
        monkeypatch.setattr(ingress, "ENGINES_COUNTED_EVERY_S", 0.001)
        here = await make_ingress(monkeypatch, max_running=2, max_queue=3)
        counting = asyncio.ensure_future(here._count_engines())
        for nodes[:], limit in ((["a"], 5), (["a", "b", "c"], 15), ([], 5)):
            async with asyncio.timeout(5):
                while 5 * here._num_engines != limit:
                    await asyncio.sleep(0.001)
            entered = [here.in_flight.enter((), 1) for _ in range(limit)]
            for entry in entered:
                entry.__enter__()
            with pytest.raises(Overloaded, match=f"the limit is {limit}"):
                here.in_flight.check_room()
            for entry in entered:
                entry.__exit__(None, None, None)
        counting.cancel()

    asyncio.run(go())


def test_engines_that_cannot_be_counted_are_as_many_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def unknown() -> list[str]:
        raise ConnectionError("no head node")

    async def go() -> int:
        monkeypatch.setattr(ingress, "engine_node_ids", unknown)
        monkeypatch.setattr(ingress, "ENGINES_COUNTED_EVERY_S", 0.001)
        here = await make_ingress(monkeypatch)
        here._num_engines = 7
        counting = asyncio.ensure_future(here._count_engines())
        async with asyncio.timeout(5):
            while len(caplog.records) < 3:
                await asyncio.sleep(0.001)
        counting.cancel()
        return here._num_engines

    assert asyncio.run(go()) == 7
    assert "no head node" in caplog.text


def test_an_ingress_that_drains_is_not_ready_and_ends_what_takes_too_long(monkeypatch: pytest.MonkeyPatch):
    async def go() -> None:
        here = await make_ingress(monkeypatch)
        with here.in_flight.enter(("mine",), 1) as entry:
            draining = asyncio.ensure_future(here.drain())
            error = await entry.must_end
            assert "took longer than 0.05 s" in error.message
            assert await here.not_ready() == "The server is shutting down."
        await draining

    asyncio.run(go())


def test_an_ingress_drains_when_serve_stops_it(monkeypatch: pytest.MonkeyPatch):
    acts: list[Any] = []
    monkeypatch.setattr(ingress, "when_stopping", acts.append)

    async def go() -> bool:
        here = await make_ingress(monkeypatch)
        (stop,) = acts
        await stop()
        return here.in_flight.is_draining

    assert asyncio.run(go())
