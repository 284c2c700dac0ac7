"""Limits of API keys over several ingresses: each key is counted by its home."""

import asyncio
import pickle
from collections.abc import Coroutine
from typing import Any

import pytest

from deployments.calls.replica_calls import NoAnswer
from deployments.http import shared_limits
from deployments.http.api_keys import KeyIdentity, KeyLimits
from deployments.http.openai.dialect import OPENAI
from deployments.http.rate_limits import RateLimited
from deployments.http.shared_limits import SharedLimits
from deployments.placement.rendezvous import Rendezvous
from engine.errors import InvalidRequest
from tests.support.clock import Clock

NODES = ("node-0", "node-1", "node-2")


class Cluster:
    """Ingresses that call each other; what they send is pickled.

    Attributes:
        silent: Nodes that do not answer.
        gone: Replicas that no longer run.
        loses: A method whose next answer is lost.
        sent: (from, to, method) of each call.
    """

    def __init__(self, *node_ids: str) -> None:
        self.clock = Clock()
        self.order = Rendezvous(dict.fromkeys(node_ids, 1.0))
        self.silent: set[str] = set()
        self.gone: set[str] = set()
        self.loses = ""
        self.sent: list[tuple[str, str, str]] = []
        self.limits = {node_id: SharedLimits(Ingress(self, node_id), self.clock) for node_id in node_ids}


class Ingress:
    def __init__(self, cluster: Cluster, node_id: str):
        self._cluster = cluster
        self.node_id, self.replica_id = node_id, f"replica of {node_id}"

    def home_of(self, key: int) -> str:
        return self._cluster.order.ranked(key, 1)[0]

    def is_running(self, replica_id: str) -> bool:
        return replica_id not in self._cluster.gone

    async def ask(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        self._cluster.sent.append((self.node_id, node_id, method))
        await asyncio.sleep(0)
        if node_id in self._cluster.silent:
            raise NoAnswer
        asked = getattr(self._cluster.limits[node_id], method.replace("limits", "for"))
        answer = pickle.loads(pickle.dumps(asked(*pickle.loads(pickle.dumps(args)))))  # noqa: S301
        if self._cluster.loses == method:
            self._cluster.loses = ""
            raise NoAnswer
        return answer


def key(name: str = "ann", **limits: int) -> KeyIdentity:
    return KeyIdentity(name, limits=KeyLimits(**limits))


async def send(limits: SharedLimits, key: KeyIdentity, num_choices: int = 1, num_tokens: int = 0) -> None:
    async with limits.enter(key, num_choices) as use:
        use.num_tokens = num_tokens
    await asyncio.sleep(0.001)  # the end is told in the background


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def test_requests_per_minute_hold_over_all_ingresses():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_requests_per_minute=6)
        for i in range(6):
            await send(cluster.limits[NODES[i % 3]], ann)
        for node_id in NODES:
            with pytest.raises(RateLimited) as error:
                await send(cluster.limits[node_id], ann)
            assert error.value.wait_s == pytest.approx(10)
            assert cluster.limits[node_id].headers(ann, OPENAI)["x-ratelimit-remaining-requests"] == "0"
        cluster.clock.advance(10)
        await send(cluster.limits["node-1"], ann)

    run(go())


def test_tokens_of_answers_at_all_ingresses_are_counted():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_tokens_per_minute=600)
        for node_id in NODES:
            await send(cluster.limits[node_id], ann, num_tokens=200)
        for node_id in NODES:
            with pytest.raises(RateLimited):
                await send(cluster.limits[node_id], ann)

    run(go())


def test_choices_in_flight_hold_over_all_ingresses():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_rows=2)
        async with cluster.limits["node-0"].enter(ann, 1), cluster.limits["node-1"].enter(ann, 1):
            for node_id in NODES:
                with pytest.raises(RateLimited, match="2 choices are in flight"):
                    await send(cluster.limits[node_id], ann)
                with pytest.raises(InvalidRequest, match="`n` is 3"):
                    await send(cluster.limits[node_id], ann, 3)
        await asyncio.sleep(0.001)
        await send(cluster.limits["node-2"], ann, 2)

    run(go())


def test_failed_request_frees_its_choices():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_rows=1)
        for node_id in NODES:
            with pytest.raises(ZeroDivisionError):
                async with cluster.limits[node_id].enter(ann, 1):
                    raise ZeroDivisionError
            await asyncio.sleep(0.001)
        await send(cluster.limits["node-0"], ann)

    run(go())


def test_keys_have_different_homes_and_a_request_costs_at_most_two_messages():
    async def go() -> None:
        cluster = Cluster(*NODES)
        for i in range(60):
            await send(cluster.limits["node-0"], key(f"key-{i}", max_rows=1))
        homes = {to for _, to, _ in cluster.sent}
        assert homes == {"node-1", "node-2"} and 60 < len(cluster.sent) < 2 * 60
        before = len(cluster.sent)
        await send(cluster.limits["node-1"], KeyIdentity("free"))
        await send(Cluster("node-0").limits["node-0"], key(max_rows=1))
        assert len(cluster.sent) == before, "nothing for keys without limits"

    run(go())


def test_single_ingress_counts_by_itself():
    async def go() -> None:
        limits, ann = SharedLimits(), key(max_requests_per_minute=1)
        await send(limits, ann)
        with pytest.raises(RateLimited):
            await send(limits, ann)

    run(go())


def test_ingresses_count_by_themselves_while_the_home_is_silent_and_do_not_ask_it_each_time():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_requests_per_minute=2)
        home = cluster.limits["node-0"]._peers.home_of(shared_limits._hash(ann))  # type: ignore[union-attr]
        here, there = (node_id for node_id in NODES if node_id != home)
        cluster.silent.add(home)
        for node_id in (here, there):
            for _ in range(2):
                await send(cluster.limits[node_id], ann)
            with pytest.raises(RateLimited):
                await send(cluster.limits[node_id], ann)
        entered = [one for one in cluster.sent if one[2] == "enter_limits"]
        assert [one[0] for one in entered] == [here, there]
        cluster.silent.clear()
        cluster.clock.advance(shared_limits.SILENT_S)
        await send(cluster.limits[here], ann)
        assert cluster.sent[-2:] == [(here, home, "enter_limits"), (here, home, "leave_limits")]

    run(go())


@pytest.mark.parametrize("loses", ["enter_limits", "leave_limits"])
def test_a_lost_message_leaves_no_choice_in_flight_at_the_home(loses: str, monkeypatch: pytest.MonkeyPatch):
    """Its answer is lost on the way back, or the message itself on the way there."""
    monkeypatch.setattr(shared_limits, "END_PAUSE_S", 0.01)

    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_rows=1, max_tokens_per_minute=600)
        home = cluster.limits["node-0"]._peers.home_of(shared_limits._hash(ann))  # type: ignore[union-attr]
        here, other = (node_id for node_id in NODES if node_id != home)
        cluster.loses = loses
        await send(cluster.limits[here], ann, num_tokens=200)
        await asyncio.sleep(0.1)
        assert cluster.loses == "", "one message was lost"
        await send(cluster.limits[other], ann)
        assert cluster.limits[home]._counts.levels(ann)["tokens"] == (600 if loses == "enter_limits" else 400)

    run(go())


def test_an_end_that_overtakes_the_beginning_leaves_no_choice_in_flight():
    cluster, ann = Cluster(*NODES), key(max_rows=1)
    home = cluster.limits["node-0"]
    home.leave_for("other", "id", ann, 0)
    for _ in range(2):
        assert home.enter_for("other", "id", ann, 1).refusal is None
    assert home.enter_for("other", "next", ann, 1).refusal is None
    assert home.enter_for("other", "third", ann, 1).refusal is not None


def test_choices_of_an_ingress_that_was_lost_end():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_rows=1)
        home = cluster.limits["node-0"]._peers.home_of(shared_limits._hash(ann))  # type: ignore[union-attr]
        lost, other = (node_id for node_id in NODES if node_id != home)
        entered = cluster.limits[lost].enter(ann, 1)
        await entered.__aenter__()
        cluster.gone.add(f"replica of {lost}")
        with pytest.raises(RateLimited):
            await send(cluster.limits[other], ann)
        cluster.clock.advance(shared_limits.LOST_S)
        await send(cluster.limits[other], ann)
        await entered.__aexit__(None, None, None)
        await asyncio.sleep(0.001)
        async with cluster.limits[other].enter(ann, 1):
            with pytest.raises(RateLimited):
                await send(cluster.limits[home], ann)

    run(go())


def test_ingress_that_is_idle_for_long_keeps_its_choices_while_it_runs():
    async def go() -> None:
        cluster, ann = Cluster(*NODES), key(max_rows=1)
        home = cluster.limits["node-0"]._peers.home_of(shared_limits._hash(ann))  # type: ignore[union-attr]
        first, other = (node_id for node_id in NODES if node_id != home)
        async with cluster.limits[first].enter(ann, 1):
            cluster.clock.advance(10 * shared_limits.LOST_S)
            with pytest.raises(RateLimited):
                await send(cluster.limits[other], ann)

    run(go())
