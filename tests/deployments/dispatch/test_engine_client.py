"""EngineClient against handles that behave as Ray's do, and against Serve's local testing mode with a real engine."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import grpc
import numpy as np
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.args import AppArgs
from deployments.calls import replica_calls
from deployments.calls.replica_calls import is_replica_lost
from deployments.calls.replica_choice import NoReplica, NoReplicaYet
from deployments.dispatch import engine_stream
from deployments.dispatch.engine_client import EngineClient
from deployments.dispatch.engine_stream import EngineStream, failure_of
from deployments.model_replica import ModelReplica
from deployments.planners.text import TextMTP
from deployments.ray_internals import RunningNode
from deployments.requests import ChatRequest, Plan, Route
from engine.config import EngineConfig
from engine.errors import Cancelled, EngineFailed, InvalidRequest, Overloaded, QueueTimeout, Unavailable
from engine.protocol import (
    GRAMMAR_FAILED,
    HEARTBEAT,
    EngineRequest,
    FinishReason,
    GrammarSpec,
    ImagePatches,
    Progress,
    SamplingParams,
    TokenChunk,
)
from tests.deployments.fake_handle import FakeCall, FakeHandle, FakeStream, running, task_error
from tests.support.clock import Clock
from tests.support.cold_runner import cold_engines

REQUEST = ChatRequest("r", ({"role": "user", "content": "What is 12 + 30?"},), temperature=0)
PLAN = Plan(EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,)), "node-0")
LAST = TokenChunk((3,), FinishReason.STOP)

Item = TokenChunk | BaseException | float


@pytest.fixture(autouse=True)
def first_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among equal engines the first one is chosen."""
    monkeypatch.setattr(random, "random", lambda: 0.0)


@dataclass
class Graph(FakeHandle):
    """Handles of engines and planners; each attempt takes the next scenario, the last one stays.

    Attributes:
        num_engines: Engines that run, `replica-0` on `node-0` and so on.
        pins: Session ids of the plans.
        nodes: Nodes of the dispatched requests.
    """

    streams: list[list[Item]] = field(default_factory=lambda: [[TokenChunk((1,)), TokenChunk((2,)), LAST]])
    plans: list[Item | Plan] = field(default_factory=lambda: [PLAN])
    log: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    num_engines: int = 2

    def client(self, **options: Any) -> EngineClient:
        graph: Any = self
        return EngineClient(graph, {Route.TEXT: graph}, **options)

    def running(self) -> dict[str, Any]:
        return running(*(f"node-{i}" for i in range(self.num_engines)))

    def call(self, request: ChatRequest | EngineRequest, engine_id: str = "") -> FakeCall:
        if isinstance(request, EngineRequest):
            self.log.append("dispatch")
            self.nodes.append(self.chosen["session_id"].removeprefix("node:").removesuffix("@0"))
            return self.dispatch(request)
        assert engine_id.startswith("node-")
        self.log.append("plan")
        self.pins.append(self.chosen["session_id"])
        return FakeCall(self._next(self.plans), lambda: self.log.append("cancel plan"))

    def dispatch(self, request: EngineRequest) -> FakeStream:
        return self.streaming(self._next(self.streams))

    def streaming(self, items: list[Item]) -> FakeStream:
        return FakeStream(items, lambda: self.log.append("cancel"), lambda: self.log.append("end"))

    def _next(self, scenarios: list[Any]) -> Any:
        return scenarios.pop(0) if len(scenarios) > 1 else scenarios[0]


def run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await make()

    return asyncio.run(bounded())


async def tokens(stream: EngineStream) -> list[int]:
    return [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]


def answer(graph: Graph) -> list[int]:
    async def go() -> list[int]:
        return await tokens(await graph.client().start(REQUEST, Route.TEXT))

    return run(go)


def test_plan_and_tokens_come_from_the_same_node():
    graph = Graph()
    assert answer(graph) == [1, 2, 3]
    assert graph.log == ["plan", "dispatch", "end", "cancel"]
    assert graph.pins == ["node:node-0"] and graph.nodes == ["node-0"]


def test_pixels_are_dropped_as_soon_as_the_engine_has_them():
    """They reach the engine, and nothing here keeps them while the answer runs; what else is known of them stays."""
    pixels = np.zeros((16, 3, 16, 16), np.uint8)
    alive = weakref.ref(pixels)
    images = (ImagePatches(pixels, (1, 4, 4), 4, "hash"),)
    graph = Graph(plans=[replace(PLAN, request=replace(PLAN.request, images=images))])
    sent: list[int] = []

    def dispatch(request: EngineRequest) -> FakeStream:
        sent.append(request.num_pixel_bytes)
        return graph.streaming([TokenChunk((1,)), LAST])

    graph.dispatch = dispatch

    async def go() -> None:
        stream = await graph.client().start(REQUEST, Route.TEXT)
        gc.collect()
        assert sent == [16 * 768] and alive() is None
        (image,) = stream.plan.request.images
        assert (image.grid_thw, image.num_tokens, image.content_hash, image.patches.nbytes) == ((1, 4, 4), 4, "hash", 0)
        assert await tokens(stream) == [1, 3]

    del pixels, images
    graph.plans, plans = [], graph.plans
    graph._next = lambda scenarios: plans.pop() if scenarios is graph.plans else scenarios[0]
    run(go)


@pytest.mark.parametrize(
    "scenario",
    [
        Graph(streams=[[ActorDiedError()], [LAST]]),
        Graph(streams=[[ActorUnavailableError("away", None)], [LAST]]),
        Graph(streams=[[ReplicaUnavailableError("gone")], [LAST]]),
        Graph(
            streams=[
                [grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata())],
                [LAST],
            ]
        ),
        Graph(streams=[[LAST]], plans=[ActorDiedError(), PLAN]),
        Graph(streams=[[LAST]], plans=[task_error(ActorDiedError()), PLAN]),
        Graph(streams=[[asyncio.CancelledError()], [LAST]]),  # cancelled by the replica, not by the caller
        Graph(streams=[[LAST]], plans=[asyncio.CancelledError(), PLAN]),
    ],
)
def test_request_moves_to_another_replica_when_a_replica_dies_before_the_first_token(scenario: Graph):
    assert answer(scenario) == [3]
    assert [pin.partition("@")[0] for pin in scenario.pins] == ["node:node-0", "node:node-1"]


def test_request_fails_after_a_second_replica_loss_before_the_first_token():
    graph = Graph(streams=[[ActorDiedError()]])
    with pytest.raises(Unavailable, match=r"before the first token\. Please send the request again") as error:
        answer(graph)
    assert error.value.retry_after_s >= 1
    assert graph.log.count("dispatch") == 2


@pytest.mark.parametrize("loss", [ActorUnavailableError("away", None), asyncio.CancelledError()])
def test_replica_that_dies_after_the_first_token_ends_the_stream_as_unavailable_if_it_may_not_go_on(
    loss: BaseException,
):
    graph = Graph(streams=[[TokenChunk((1,)), loss]])

    async def go() -> list[int]:
        return await tokens(await graph.client().start(REQUEST, Route.TEXT, may_resume=False))

    with pytest.raises(Unavailable, match="in the middle of the answer") as error:
        run(go)
    assert error.value.retry_after_s >= 1
    assert graph.nodes == ["node-0"] and graph.log[-1] == "cancel"


@pytest.mark.parametrize(
    ("error", "num_engines"),
    [
        (InvalidRequest("no such role", "messages[0]"), 2),
        (QueueTimeout("waited", 3.0), 2),
        (EngineFailed("a step failed"), 2),
        (Overloaded("full", 3.0), 1),
        (Unavailable("short of memory", 3.0), 1),
    ],
)
def test_engine_errors_keep_their_type_and_arguments_through_ray(error: Exception, num_engines: int):
    for graph in (Graph(plans=[task_error(error)]), Graph(streams=[[task_error(error)]])):
        graph.num_engines = num_engines
        with pytest.raises(type(error)) as raised:
            answer(graph)
        assert type(raised.value) is type(error)
        assert raised.value.args == error.args
        assert graph.pins == ["node:node-0"]


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (TokenChunk((), FinishReason.ERROR, "out of memory"), EngineFailed("out of memory")),
        (TokenChunk((), FinishReason.ERROR, "it drains", retry_after_s=3.0), Unavailable("it drains", 3.0)),
        (TokenChunk((), FinishReason.ABORT), Cancelled("The request was cancelled.")),
    ],
)
def test_failure_in_the_first_chunk_is_raised_by_the_start_of_the_request(first: TokenChunk, error: Exception):
    graph = Graph(streams=[[first]], num_engines=1)
    with pytest.raises(type(error)) as raised:
        answer(graph)
    assert (type(raised.value), raised.value.args) == (type(error), error.args)
    assert graph.log == ["plan", "dispatch", "cancel"]


def test_wait_for_an_engine_has_a_time_limit():
    async def go() -> None:
        graph = Graph()
        client = graph.client(engine_timeout_s=0.05)
        await tokens(await client.start(REQUEST, Route.TEXT))
        graph.num_engines = 0
        await client.start(REQUEST, Route.TEXT)

    with pytest.raises(Unavailable, match=r"No engine has been running for 0\.05 s"):
        run(go)


@pytest.mark.parametrize(
    "graph, expected",
    [
        (Graph(num_engines=0), []),
        (Graph(plans=[60.0]), ["plan", "cancel plan"]),
        (Graph(streams=[[60.0, LAST]]), ["plan", "dispatch", "cancel"]),
    ],
)
def test_request_cancelled_before_the_first_token_cancels_its_plan_and_its_call(graph: Graph, expected: list[str]):
    async def go() -> None:
        task = asyncio.ensure_future(graph.client().start(REQUEST, Route.TEXT))
        before = [*takewhile(lambda entry: not entry.startswith("cancel"), expected)]
        while graph.log != before:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(go)
    assert graph.log == expected


def test_stream_cancelled_midway_cancels_the_engine_call():
    graph = Graph(streams=[[TokenChunk((1,)), 60.0, LAST]])

    async def go() -> None:
        stream = await graph.client().start(REQUEST, Route.TEXT)
        reader = asyncio.ensure_future(tokens(stream))
        await asyncio.sleep(0.02)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    run(go)
    assert graph.log[-1] == "cancel"


def test_unread_stream_can_be_closed_twice():
    graph = Graph()

    async def go() -> None:
        stream = await graph.client().start(REQUEST, Route.TEXT)
        await asyncio.gather(stream.aclose(), stream.aclose())

    run(go)
    assert graph.log == ["plan", "dispatch", "cancel"]


def test_num_cached_tokens_of_a_stream_comes_from_its_first_chunk():
    async def go() -> int:
        graph = Graph(streams=[[TokenChunk((1,), num_cached=9), TokenChunk((2,)), LAST]])
        return (await graph.client().start(REQUEST, Route.TEXT)).num_cached_tokens

    assert run(go) == 9


def test_num_skipped_tokens_of_a_stream_comes_from_its_first_chunk():
    async def go() -> int:
        graph = Graph(streams=[[TokenChunk((1,), num_skipped=7), TokenChunk((2,)), LAST]])
        return (await graph.client().start(REQUEST, Route.TEXT)).num_skipped_tokens

    assert run(go) == 7


def test_planning_has_a_time_limit():
    async def go() -> None:
        await Graph(plans=[60.0]).client(plan_timeout_s=0.05).start(REQUEST, Route.TEXT)

    with pytest.raises(Unavailable, match=r"could not be prepared within 0\.05 s"):
        run(go)


def test_unexpected_error_keeps_its_type():
    with pytest.raises(ZeroDivisionError):
        answer(Graph(plans=[task_error(ZeroDivisionError("oops"))]))


# --- elsewhere, once -----------------------------------------------------------------------------------------------

REFUSALS = [Overloaded("full", 3.0), Unavailable("short of memory", 3.0)]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_request_refused_by_an_engine_or_planner_is_tried_on_another_node(error: Exception):
    refused = TokenChunk((), FinishReason.ERROR, "it drains", retry_after_s=3.0)
    for graph in (
        Graph(streams=[[LAST]], plans=[task_error(error), PLAN]),
        Graph(streams=[[task_error(error)], [LAST]]),
        Graph(streams=[[refused], [LAST]]),
    ):
        assert answer(graph) == [3]
        assert graph.pins == ["node:node-0", "node:node-1"]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_request_refused_by_two_engines_fails_with_the_refusal(error: Exception):
    graph = Graph(streams=[[task_error(error)]], num_engines=3)
    with pytest.raises(type(error)) as raised:
        answer(graph)
    assert raised.value.args == error.args
    assert graph.pins == ["node:node-0", "node:node-1"]


@dataclass
class TwoHosts(Graph):
    """Two engines on `node-0`, and those of other nodes."""

    others: tuple[str, ...] = ("node-1:0", "node-1:1")

    def running(self) -> dict[str, Any]:
        return running("node-0:0", "node-0:1", *self.others)


LOST_THERE: list[tuple[list[list[Item]], list[Item | Plan]]] = [
    ([[ActorDiedError()], [LAST]], [PLAN]),
    ([[TokenChunk((1,)), ActorDiedError()], [LAST]], [PLAN]),
    ([[LAST]], [NoReplica("node node-0 has had no replica of TextMTP for 2 s"), PLAN]),
    ([[LAST]], [task_error(Unavailable("the planner is replaced", 3.0)), PLAN]),
]


@pytest.mark.parametrize("streams, plans", LOST_THERE)
def test_after_a_loss_the_engines_of_another_node_come_before_those_of_the_same(streams: Any, plans: Any):
    for others, last in ((("node-1:0", "node-1:1"), "node-1:0"), ((), "node-0:1")):
        graph = TwoHosts(streams=list(streams), plans=list(plans), others=others)
        assert answer(graph)[-1] == 3
        lost_planner = isinstance(plans[0], NoReplica)
        assert graph.nodes[-1] == ("node-0:0" if lost_planner and not others else last)


def test_an_answer_that_an_engine_gives_up_in_order_may_go_on_at_its_neighbour():
    graph = TwoHosts(streams=[[TokenChunk((1,)), moved()], [LAST]], others=())
    assert answer(graph) == [1, 3] and graph.nodes == ["node-0:0", "node-0:1"]


def test_lost_engine_is_excluded_and_its_replacement_is_waited_for():
    async def go() -> Graph:
        graph = Graph(streams=[[ActorDiedError()], [LAST]], num_engines=1)
        asyncio.get_running_loop().call_later(0.1, setattr, graph, "num_engines", 2)
        assert await tokens(await graph.client().start(REQUEST, Route.TEXT)) == [3]
        return graph

    assert run(go).pins == ["node:node-0", "node:node-1"]


def test_refused_request_does_not_wait_for_another_engine():
    error = Overloaded("full", 3.0)
    graph = Graph(streams=[[task_error(error)]], num_engines=1)
    with pytest.raises(Overloaded) as raised:
        answer(graph)
    assert raised.value.args == error.args and graph.nodes == ["node-0"]


def test_engine_without_a_planner_on_its_node_is_tried_last_and_then_waits_for_the_planner():
    missing = NoReplica("node node-0 has had no replica of TextMTP for 2 s")
    two = Graph(streams=[[LAST]], plans=[missing, PLAN])
    assert answer(two) == [3]
    assert two.nodes == ["node-1"]
    one = Graph(streams=[[LAST]], plans=[missing, PLAN], num_engines=1)
    assert answer(one) == [3]
    short, long = one.pins
    assert short == "node:node-0" and long.startswith("node:node-0@") and 20 < float(long.partition("@")[2]) <= 30


def test_request_before_the_first_planner_is_told_so_and_the_engine_is_not_blamed():
    graph = Graph(streams=[[LAST]], plans=[NoReplicaYet("no replica of MLLM has been running yet"), PLAN])

    async def go() -> None:
        client = graph.client()
        with pytest.raises(Unavailable, match="prepares this request is still being started") as error:
            await client.start(REQUEST, Route.TEXT)
        assert error.value.retry_after_s >= 1 and len(graph.pins) == 1
        await tokens(await client.start(REQUEST, Route.TEXT))
        assert graph.nodes == ["node-0"]

    run(go)


def test_engine_that_refused_or_was_lost_is_chosen_last_for_a_while():
    clock = Clock()
    graph = Graph(
        streams=[[task_error(Overloaded("full", 3.0))], [LAST], [LAST], [ActorDiedError()], [LAST], [LAST], [LAST]]
    )

    async def go() -> list[str]:
        client = graph.client(clock=clock)
        for clock.now_s in (0.0, 1.0, 5.0, 10.0, 40.0):
            await tokens(await client.start(REQUEST, Route.TEXT))
        return graph.nodes

    # refused at 0 s, then last at 1 s; chosen again at 5 s, and lost; last at 10 s; forgotten at 40 s
    assert run(go) == ["node-0", "node-1", "node-1", "node-0", "node-1", "node-1", "node-0"]


def test_retried_request_gets_the_tokens_of_an_undisturbed_request():
    undisturbed = Graph()
    for disturbed in (
        Graph(streams=[[ActorDiedError()], *undisturbed.streams]),
        Graph(streams=[[task_error(Overloaded("full", 3.0))], *undisturbed.streams]),
    ):
        assert answer(disturbed) == answer(Graph()) == [1, 2, 3]


def test_request_is_not_retried_after_its_first_token():
    for error in REFUSALS:
        graph = Graph(streams=[[TokenChunk((1,)), task_error(error)], [LAST]])
        with pytest.raises((Overloaded, Unavailable)):
            answer(graph)
        assert graph.log.count("dispatch") == 1


def test_both_attempts_share_the_time_limit_of_the_wait_for_an_engine():
    async def go() -> None:
        graph = Graph(streams=[[ActorDiedError()]], num_engines=0)
        client = graph.client(engine_timeout_s=0.5)
        asyncio.get_running_loop().call_later(0.3, setattr, graph, "num_engines", 1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match=r"No engine has been running for 0\.5 s"):
            await client.start(REQUEST, Route.TEXT)
        assert graph.nodes == ["node-0"] and asyncio.get_running_loop().time() - began < 0.75

    run(go)


def test_request_before_the_first_ready_engine_is_told_so():
    clock = Clock()

    async def go() -> None:
        client = Graph(num_engines=0).client(clock=clock)
        clock.now_s += 6.0
        with pytest.raises(Unavailable, match="the model is being loaded") as error:
            await client.start(REQUEST, Route.TEXT)
        assert error.value.retry_after_s >= 1

    run(go)


class RefusingGraph(Graph):
    """Two engines: that of `node-0` refuses at once, the other one takes a while for each answer."""

    def dispatch(self, request: EngineRequest) -> FakeStream:
        if self.nodes[-1] == "node-0":
            return self.streaming([0.001, task_error(Unavailable("short of memory", 3.0))])
        return self.streaming([0.05, LAST])


def test_engine_that_refuses_at_once_does_not_attract_most_requests():
    async def go() -> tuple[int, int]:
        graph = RefusingGraph()
        client = graph.client()

        async def visit(i: int) -> bool:
            await asyncio.sleep(0.005 * i)
            try:
                return await tokens(await client.start(REQUEST, Route.TEXT)) == [3]
            except Unavailable:
                return False

        answered = await asyncio.gather(*[visit(i) for i in range(100)])
        return answered.count(False), graph.nodes.count("node-0")

    num_failed, num_refused = run(go)
    assert num_failed == 0 and num_refused < 10


# --- engines that fall silent --------------------------------------------------------------------------------------


def test_heartbeats_keep_a_stream_alive_and_are_not_passed_on():
    beats: list[Item] = [item for _ in range(4) for item in (0.2, HEARTBEAT)]

    async def go() -> list[TokenChunk]:
        graph = Graph(streams=[[*beats, TokenChunk((1,), num_cached=9), *beats, LAST]])
        stream = await graph.client(silence_limit_s=0.5).start(REQUEST, Route.TEXT)
        assert stream.num_cached_tokens == 9, "a heartbeat is not the first chunk"
        return [chunk async for chunk in stream]

    assert run(go) == [TokenChunk((1,), num_cached=9), LAST]


def test_an_engine_that_falls_silent_before_the_first_token_is_replaced():
    async def go() -> tuple[list[int], Graph]:
        graph = Graph(streams=[[HEARTBEAT, 60.0], [LAST]])
        return await tokens(await graph.client(silence_limit_s=0.1).start(REQUEST, Route.TEXT)), graph

    got, graph = run(go)
    assert got == [3] and graph.nodes == ["node-0", "node-1"]


def test_engine_silent_after_the_first_token_loses_the_stream_to_another_one_and_is_chosen_last():
    async def go() -> Graph:
        graph = Graph(streams=[[TokenChunk((1,)), HEARTBEAT, 60.0], [LAST]])
        client = graph.client(silence_limit_s=0.1)
        assert await tokens(await client.start(REQUEST, Route.TEXT)) == [1, 3]
        await tokens(await client.start(REQUEST, Route.TEXT))
        return graph

    graph = run(go)
    assert graph.nodes == ["node-0", "node-1", "node-1"]


# --- answers that go on at another engine --------------------------------------------------------------------------


@dataclass
class Resumed(Graph):
    """Records what each engine is asked for."""

    sent: list[EngineRequest] = field(default_factory=list)

    def dispatch(self, request: EngineRequest) -> FakeStream:
        self.sent.append(request)
        return super().dispatch(request)


def moved(*token_ids: int, index: int = 0) -> TokenChunk:
    return TokenChunk(token_ids, FinishReason.MOVED, index=index)


@pytest.mark.parametrize(
    "end",
    [
        [ActorDiedError()],
        [task_error(ActorDiedError())],
        [asyncio.CancelledError()],
        [ReplicaUnavailableError("gone")],
        [moved()],
    ],
)
def test_answer_goes_on_at_another_engine_with_the_tokens_that_the_client_has(end: list[Item]):
    graph = Resumed(streams=[[TokenChunk((1,), num_cached=9), TokenChunk((2, 3)), *end], [TokenChunk((4,)), LAST]])

    async def go() -> tuple[list[int], EngineStream]:
        stream = await graph.client().start(REQUEST, Route.TEXT)
        return await tokens(stream), stream

    got, stream = run(go)
    assert got == [1, 2, 3, 4, 3]
    first, second = graph.sent
    assert first.progress == () and second.progress == (Progress((1, 2, 3)),)
    assert replace(second, progress=(), spent_s=0.0) == replace(first, spent_s=0.0), "nothing else has changed"
    assert graph.nodes == ["node-0", "node-1"] and stream.node_id == "node-1"
    assert stream.num_cached_tokens == 9, "that of the first engine, which the client was told"
    assert graph.log.count("plan") == 1, "a prompt without images is not planned again"


def test_choices_that_have_ended_are_not_generated_again():
    plan = replace(PLAN, request=replace(PLAN.request, num_choices=3))
    first: list[Item] = [
        TokenChunk((1,)),
        TokenChunk((5,), index=1),
        replace(LAST, index=2),
        TokenChunk((2,)),
        ActorDiedError(),
    ]
    graph = Resumed(streams=[first, [replace(LAST, index=1), LAST]], plans=[plan])
    assert answer(graph) == [1, 5, 3, 2, 3, 3]
    assert graph.sent[1].progress == (Progress((1, 2)), Progress((5,)), Progress((3,), is_finished=True))


def test_a_draining_engine_keeps_the_choices_that_it_still_finishes():
    """Each choice is given up at the end of a step; the answer moves when no other one is left there."""
    plan = replace(PLAN, request=replace(PLAN.request, num_choices=2))
    first: list[Item] = [TokenChunk((1,)), moved(2), TokenChunk((5,), index=1), moved(6, index=1)]
    graph = Resumed(streams=[first, [LAST, replace(LAST, index=1)]], plans=[plan])
    assert answer(graph) == [1, 2, 5, 6, 3, 3]
    assert graph.sent[1].progress == (Progress((1, 2)), Progress((5, 6)))
    ended = Resumed(streams=[[TokenChunk((1,)), moved(), replace(LAST, index=1)], [LAST]], plans=[plan])
    assert answer(ended) == [1, 3, 3]
    assert ended.sent[1].progress == (Progress((1,)), Progress((3,), is_finished=True))


def test_request_that_is_moved_out_of_the_queue_begins_elsewhere():
    graph = Resumed(streams=[[moved()], [TokenChunk((1,)), LAST]])
    assert answer(graph) == [1, 3]
    assert graph.sent[1].progress == (Progress(),)


def test_images_of_an_answer_that_goes_on_are_read_again():
    image = ImagePatches(np.ones((16, 3, 16, 16), np.uint8), (1, 4, 4), 4, "hash")
    seeded = replace(PLAN.request, images=(image,), sampling=SamplingParams(8, seed=7))
    other = replace(seeded, sampling=SamplingParams(8, seed=8))
    graph = Resumed(
        streams=[[TokenChunk((1,)), ActorDiedError()], [LAST]],
        plans=[replace(PLAN, request=seeded), replace(PLAN, request=other)],
    )

    async def go() -> list[int]:
        client = EngineClient(graph, {Route.MLLM: graph})  # type: ignore[arg-type, dict-item]
        return await tokens(await client.start(REQUEST, Route.MLLM))

    assert run(go) == [1, 3]
    assert graph.sent[1].num_pixel_bytes == image.patches.nbytes
    assert graph.sent[1].sampling == seeded.sampling, "a seed that the planner drew stays"


def test_answer_whose_engines_were_lost_twice_ends_with_an_error():
    dying: list[Item] = [TokenChunk((1,)), ActorDiedError()]
    graph = Resumed(streams=[dying, dying, [LAST]])
    with pytest.raises(Unavailable, match="in the middle of the answer") as error:
        answer(graph)
    assert error.value.retry_after_s >= 1 and len(graph.sent) == 2


def test_answer_moves_three_times_at_most():
    graph = Resumed(streams=[[TokenChunk((i,)), moved()] for i in range(5)], num_engines=9)
    with pytest.raises(Unavailable, match="in the middle of the answer"):
        answer(graph)
    assert [request.progress and request.progress[0].token_ids for request in graph.sent] == [
        (),
        (0,),
        (0, 1),
        (0, 1, 2),
    ]


def test_an_answer_that_no_other_engine_takes_ends_with_the_reason():
    graph = Resumed(streams=[[TokenChunk((1,)), ActorDiedError()], [task_error(Unavailable("short of memory", 3.0))]])
    with pytest.raises(Unavailable, match=r"in the middle of the answer.*short of memory"):
        answer(graph)


def test_an_internal_error_at_the_other_engine_is_not_told_to_the_client():
    graph = Resumed(streams=[[TokenChunk((1,)), ActorDiedError()], [task_error(OSError("/secret/path"))]])
    with pytest.raises(Unavailable, match="in the middle of the answer") as error:
        answer(graph)
    assert "secret" not in error.value.message


def test_a_client_that_reads_slowly_does_not_make_the_engine_silent():
    async def go() -> list[int]:
        graph = Graph(streams=[[TokenChunk((1,)), TokenChunk((2,)), LAST]])
        got = []
        async for chunk in await graph.client(silence_limit_s=0.1).start(REQUEST, Route.TEXT):
            got += chunk.token_ids
            await asyncio.sleep(0.3)
        return got

    assert run(go) == [1, 2, 3]


def test_cancelled_request_to_a_silent_engine_is_not_retried():
    async def go() -> None:
        graph = Graph(streams=[[60.0]])
        task = asyncio.ensure_future(graph.client(silence_limit_s=0.2).start(REQUEST, Route.TEXT))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert graph.nodes == ["node-0"]

    run(go)


@pytest.mark.parametrize(
    ("code", "details", "gone"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", True),
        (grpc.StatusCode.CANCELLED, "", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.UNKNOWN, "ZeroDivisionError", False),
        (grpc.StatusCode.INTERNAL, "failed to serialize", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max", False),
    ],
)
def test_grpc_errors_of_a_lost_peer_are_retried_and_other_grpc_errors_are_raised(
    code: grpc.StatusCode, details: str, gone: bool
):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    assert is_replica_lost(error) is gone
    graph = Graph(streams=[[error], [LAST]])
    if gone:
        assert answer(graph) == [3]
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            answer(graph)


def test_plan_is_not_waited_for_when_its_node_is_lost():
    nodes = {"node-0", "node-1"}

    async def go() -> list[int]:
        graph = Graph(plans=[60.0, PLAN], streams=[[LAST]])
        asyncio.get_running_loop().call_later(0.1, nodes.discard, "node-0")
        return await tokens(await graph.client().start(REQUEST, Route.TEXT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            replica_calls, "running_nodes", lambda handle: [RunningNode(node_id, "r", {}) for node_id in nodes]
        )
        patch.setattr(replica_calls.while_running, "__defaults__", (0.01, 0.05))
        assert run(go) == [3]


def test_planner_stopped_by_serve_may_finish_a_plan_in_the_grace_period():
    async def go() -> Any:
        async def late() -> str:
            await asyncio.sleep(0.2)
            return "planned"

        work = asyncio.ensure_future(late())
        return await replica_calls.while_running(None, "node-0", work, period_s=0.01, grace_s=5)

    seen = iter([[RunningNode("node-0", "r", {})]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_calls, "running_nodes", lambda handle: next(seen, []))
        assert run(go) == "planned"


# --- the end of a stream -------------------------------------------------------------------------------------------


async def close_after_the_last_chunk(graph: Graph) -> None:
    """As TextGeneration does, which does not read on when all choices have ended."""
    stream = await graph.client().start(REQUEST, Route.TEXT)
    async for chunk in stream:
        if chunk.finish_reason is not None:
            break
    await stream.aclose()


def test_a_stream_whose_choices_have_ended_is_read_to_its_end_before_it_is_closed():
    graph = Graph()
    run(lambda: close_after_the_last_chunk(graph))
    assert graph.log == ["plan", "dispatch", "end", "cancel"]


def test_a_stream_that_does_not_end_after_its_last_chunk_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_stream, "LAST_READ_S", 0.05)
    graph = Graph(streams=[[TokenChunk((1,)), LAST, 60.0]])
    run(lambda: close_after_the_last_chunk(graph))
    assert graph.log == ["plan", "dispatch", "cancel"]


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_plan_for_another_checkpoint_is_refused_before_the_dispatch():
    other = replace(PLAN, request=replace(PLAN.request, checkpoint="new"))
    same = replace(PLAN, request=replace(PLAN.request, checkpoint="old"))

    async def go(graph: Graph) -> list[int]:
        return await tokens(await graph.client(checkpoint="old").start(REQUEST, Route.TEXT))

    graph = Graph(plans=[other])
    with pytest.raises(Unavailable, match="The model is being replaced") as error:
        run(lambda: go(graph))
    assert error.value.retry_after_s >= 1 and "dispatch" not in graph.log
    mixed = Graph(plans=[other, same])
    assert run(lambda: go(mixed)) == [1, 2, 3], "a node that has not been replaced yet may do"
    assert mixed.log.count("dispatch") == 1


@pytest.fixture(scope="module")
def local_graph() -> Iterator[tuple[Any, Any]]:
    with cold_engines():
        engine = serve.run(ModelReplica.bind(EngineConfig()), name="engine", _local_testing_mode=True)
        yield engine, serve.run(TextMTP.bind(AppArgs()), name="text", _local_testing_mode=True)
    engine.options(method_name="__del__").remote().result()  # as Serve does; the local mode forgets it


def test_real_engine_answers_in_the_local_testing_mode_of_serve(local_graph: tuple[Any, Any]):
    engine, text = local_graph

    async def go() -> tuple[Plan, list[TokenChunk]]:
        stream = await EngineClient(engine, {Route.TEXT: text}).start(REQUEST, Route.TEXT)
        return stream.plan, [chunk async for chunk in stream]

    plan, chunks = run(go)
    assert len(plan.request.token_ids) == 22
    assert chunks[-1].finish_reason == FinishReason.STOP
    assert len(chunks[0].token_ids) == 1


def test_invalid_request_error_passes_through_serve(local_graph: tuple[Any, Any]):
    engine, text = local_graph

    async def go() -> None:
        request = ChatRequest("r2", ({"role": "wizard", "content": "x"},))
        await EngineClient(engine, {Route.TEXT: text}).start(request, Route.TEXT)

    with pytest.raises(InvalidRequest, match="template"):
        run(go)


def test_grammar_beyond_the_limits_of_its_library_is_an_invalid_request():
    request = replace(PLAN.request, grammar=GrammarSpec("regex", "(ab){1000000}", "structured_outputs.regex"))
    error = failure_of(TokenChunk((), FinishReason.ERROR, f"{GRAMMAR_FAILED}too many expressions"), request)
    assert isinstance(error, InvalidRequest)
    assert "too many expressions" in error.message and error.field == "structured_outputs.regex"
    assert isinstance(failure_of(TokenChunk((), FinishReason.ERROR, "the step failed"), request), EngineFailed)


@dataclass
class Planners(FakeHandle):
    """Planners on some nodes; each call takes the next outcome. After `absent_looks` looks the planners run."""

    outcomes: list[Any]
    num_nodes: int = 2
    absent_looks: int = 0
    renamed_after: int = 100
    """Calls after which other replicas run on the nodes."""
    asked: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)

    def running(self) -> dict[str, Any]:
        self.looks.append(1)
        found = running(*(f"node-{i}" for i in range(self.num_nodes))) if len(self.looks) > self.absent_looks else {}
        if len(self.asked) >= self.renamed_after:
            for replica in found.values():
                replica.replica_id.unique_id += " again"
        return found

    def call(self, *arguments: Any) -> FakeCall:
        self.asked.append(self.chosen["session_id"])
        return FakeCall(self.outcomes.pop(0))


def count_with(planners: Planners, **options: Any) -> Any:
    handle: Any = planners

    async def go() -> Any:
        return await EngineClient(handle, {Route.TEXT: handle}, **options).ask_planner(
            "count_tokens", Route.TEXT, REQUEST
        )

    return run(go)


@pytest.mark.parametrize("loss", [NoReplica("none on node-0"), ActorDiedError(), ReplicaUnavailableError("gone")])
def test_a_planner_that_is_lost_is_replaced_by_that_of_another_node(loss: Exception, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployments.dispatch.engine_client.node_id", lambda: "node-1")
    planners = Planners([loss, 7])
    assert count_with(planners) == 7
    assert planners.asked == ["node:node-1", "node:node-0"], "the own one first"


def test_a_planner_that_is_started_again_is_waited_for_but_not_for_ever():
    planners = Planners([7], num_nodes=1, absent_looks=2)
    assert count_with(planners) == 7
    again = Planners([ActorDiedError(), 7], num_nodes=1, renamed_after=1)
    assert count_with(again) == 7 and again.asked == ["node:node-0"] * 2, "by the replica that takes its place"
    nowhere = Planners([], num_nodes=0)
    with pytest.raises(Unavailable, match="prepares this request is still being started") as error:
        count_with(nowhere, engine_timeout_s=0.3)
    assert error.value.retry_after_s >= 1 and not nowhere.asked
    with pytest.raises(Unavailable, match="prepares this request is still being started"):
        count_with(Planners([ActorDiedError()], num_nodes=1), engine_timeout_s=0.3)


def test_errors_of_a_planner_itself_are_the_answer():
    planners = Planners([task_error(InvalidRequest("no", "messages")), 7])
    with pytest.raises(InvalidRequest, match="no"):
        count_with(planners)
    assert len(planners.asked) == 1
    with pytest.raises(Unavailable, match=r"could not be prepared within 0\.1 s"):
        count_with(Planners([5.0]), plan_timeout_s=0.1)
