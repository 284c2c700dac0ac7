"""Groups of texts: their bounds, their order, and how EngineClient plans, computes and retries them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from deployments.args import AppArgs
from deployments.dispatch.engine_client import EngineClient
from deployments.dispatch.text_group import MAX_CHARACTERS, MAX_TEXTS, TextResults, each
from deployments.model_replica import ModelReplica
from deployments.planners.text import TextMTP
from deployments.requests import ChatRequest, Route
from engine.config import EngineConfig
from engine.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    OrchardError,
    Overloaded,
    Unavailable,
)
from engine.protocol import EngineRequest, FinishReason, GroupEnds, SamplingParams, TokenChunk
from tests.deployments.fake_handle import FakeCall, FakeHandle, FakeStream, running, task_error
from tests.support.cold_runner import cold_engines


def text(index: int, prompt: str = "", **fields: Any) -> ChatRequest:
    prompt = prompt or f"text {index}"
    return ChatRequest(f"e-{index}", (), raw_prompt=prompt, prompt_field=f"input[{index}]", **fields)


def run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await make()

    return asyncio.run(bounded())


# --- groups ---------------------------------------------------------------------------------------------------------


def groups_of(texts: list[ChatRequest], num_parallel: int = 4, num_engines: int = 1) -> list[list[str]]:
    """The prompts of each group; the results must be those of the texts."""
    asked: list[list[str]] = []

    async def compute(group: Sequence[ChatRequest], share: int, max_open: int | None) -> TextResults:
        asked.append([str(one.raw_prompt) for one in group])
        await asyncio.sleep(0)
        return [(str(one.raw_prompt).encode(), index) for index, one in enumerate(group)]

    found = run(lambda: each(texts, compute, num_parallel, num_engines))
    assert [result for result, _ in found] == [str(one.raw_prompt).encode() for one in texts]
    return asked


def test_a_group_has_at_most_so_many_texts_and_bytes_unless_a_single_text_is_larger():
    assert [len(group) for group in groups_of([text(i) for i in range(70)])] == [MAX_TEXTS, MAX_TEXTS, 6]
    half, large = "a" * (MAX_CHARACTERS // 2), "b" * (3 * MAX_CHARACTERS)
    prompts = [half, half, half, large, half, "c"]
    found = groups_of([text(i, prompt) for i, prompt in enumerate(prompts)])
    assert found == [[half, half], [half], [large], [half, "c"]]


def test_the_query_of_a_score_counts_for_its_group():
    texts = [text(i, "a" * 10, scored_query="b" * (MAX_CHARACTERS // 4)) for i in range(8)]
    assert [len(group) for group in groups_of(texts)] == [3, 3, 2]


def test_texts_are_divided_among_engines():
    texts = [text(i) for i in range(10)]
    assert [len(group) for group in groups_of(texts, 4, 1)] == [len(group) for group in groups_of(texts, 4, 0)] == [10]
    assert [len(group) for group in groups_of(texts, 4, 3)] == [4, 4, 2]
    assert [len(group) for group in groups_of(texts, 4, 9)] == [3, 3, 3, 1]
    assert [len(group) for group in groups_of(texts[:2], 2, 9)] == [1, 1]


@pytest.mark.parametrize(("num_parallel", "num_engines", "num_groups"), [(4, 1, 2), (4, 4, 4), (1, 4, 1), (8, 3, 6)])
def test_groups_under_way_share_the_texts_that_the_request_counts_for(num_parallel, num_engines, num_groups):
    shares: list[int] = []
    limits: list[int | None] = []
    most = num_running = 0

    async def compute(group: Sequence[ChatRequest], share: int, max_open: int | None) -> TextResults:
        nonlocal most, num_running
        num_running += 1
        most = max(most, num_running)
        shares.append(share)
        limits.append(max_open)
        for _ in range(3):
            await asyncio.sleep(0)
        num_running -= 1
        return [(b"", 0)] * len(group)

    texts = [text(i) for i in range(500)]
    for max_open in (None, num_parallel, 9):
        run(lambda max_open=max_open: each(texts, compute, num_parallel, num_engines, max_open=max_open))
        assert most == num_groups and set(shares) == {num_parallel // num_groups}
        assert set(limits) == {None if max_open is None else max_open // num_groups}
        limits.clear()


def test_the_first_error_cancels_the_other_groups():
    ended: list[str] = []

    async def compute(group: Sequence[ChatRequest], share: int, max_open: int | None) -> TextResults:
        if group[0].raw_prompt == "bad":
            await asyncio.sleep(0)
            raise InvalidRequest("no", group[0].prompt_field)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(group[0].request_id)
        raise AssertionError

    large = "a" * MAX_CHARACTERS
    texts = [text(0, large), text(1, "bad"), text(2, large)]
    with pytest.raises(InvalidRequest) as error:
        run(lambda: each(texts, compute, 4))
    assert (error.value.field, ended) == ("input[1]", ["e-0"])


# --- a group and its engine -----------------------------------------------------------------------------------------

Item = GroupEnds | BaseException | float


def ends(*positions: int) -> GroupEnds:
    """Results that are the name of the position among the requests that the engine has."""
    return GroupEnds(tuple((i, TokenChunk((), FinishReason.STOP, embedding=b"%4d" % i)) for i in positions))


def ended(position: int, end: TokenChunk | OrchardError) -> GroupEnds:
    return GroupEnds(((position, end),))


@dataclass
class Graph(FakeHandle):
    """Engines on `node-0` and so on, and their planners; each call of an engine takes the next scenario.

    Attributes:
        sent: What the engines got: node, ids of the requests, and how many at once.
        unplannable: Errors of the planner by request id.
    """

    streams: list[list[Item]] = field(default_factory=list)
    sent: list[tuple[Any, ...]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    unplannable: dict[str, OrchardError] = field(default_factory=dict)
    num_engines: int = 2
    checkpoint: str = ""

    def compute(self, texts: Sequence[ChatRequest], **options: Any) -> list[bytes]:
        graph: Any = self

        async def go() -> TextResults:
            return await EngineClient(graph, {Route.TEXT: graph}, **options).compute(texts, 3, 5)

        found = run(go)
        assert [num_tokens for _, num_tokens in found] == [len(str(one.raw_prompt)) for one in texts]
        return [result for result, _ in found]

    def running(self) -> dict[str, Any]:
        return running(*(f"node-{i}" for i in range(self.num_engines)))

    def call(self, *arguments: Any) -> Any:
        if self.chosen["method_name"] == "plan_group":
            self.log.append("plan")
            return FakeCall(self.planned(*arguments), lambda: self.log.append("cancel plan"))
        assert self.chosen["method_name"] == "generate_group"
        requests, num_parallel, max_open = arguments
        node = self.chosen["session_id"].removeprefix("node:").removesuffix("@0")
        self.sent.append((node, [one.request_id for one in requests], num_parallel, max_open))
        return FakeStream(self.streams.pop(0), lambda: self.log.append("cancel"), lambda: self.log.append("end"))

    def planned(self, texts: Sequence[ChatRequest]) -> list[EngineRequest | OrchardError]:
        found: list[EngineRequest | OrchardError] = []
        for one in texts:
            if one.request_id in self.unplannable:
                return [*found, self.unplannable[one.request_id]]
            tokens = np.zeros(len(str(one.raw_prompt)), np.int32)
            found.append(
                EngineRequest(one.request_id, tokens, SamplingParams(1), (), pooling="last", checkpoint=self.checkpoint)
            )
        return found


TEXTS = [text(i, "a" * (i + 1)) for i in range(4)]
NAMES = [one.request_id for one in TEXTS]


def test_a_group_is_planned_by_one_call_and_computed_by_one_and_the_call_is_read_to_its_end():
    graph = Graph(streams=[[ends(2), GroupEnds(), ends(0, 3), ends(1)]])
    assert graph.compute(TEXTS) == [b"%4d" % i for i in range(4)]
    [(node, names, *limits)] = graph.sent
    assert node in ("node-0", "node-1") and (names, limits) == (NAMES, [3, 5])
    assert graph.log == ["plan", "end", "cancel"]


def test_only_texts_without_a_result_are_computed_again_when_an_engine_dies():
    graph = Graph(streams=[[ends(0, 2), ActorDiedError()], [ends(1), ends(0)]])
    assert graph.compute(TEXTS) == [b"   0", b"   0", b"   2", b"   1"]
    [(first, all_names, *_), (second, names, *_)] = graph.sent
    assert (all_names, names) == (NAMES, ["e-1", "e-3"]) and first != second


def test_results_in_the_message_of_an_error_are_kept():
    refused = (1, Overloaded("the queue is full", 7.0, "max_queue"))
    message = GroupEnds((*ends(0).ends, refused, *ends(2).ends))
    graph = Graph(streams=[[message], [ends(0, 1)]])
    assert graph.compute(TEXTS) == [b"   0", b"   0", b"   2", b"   1"]
    assert graph.sent[1][1] == ["e-1", "e-3"]


def test_groups_under_way_at_once_go_to_different_engines():
    graph: Any = Graph(streams=[[ends(0)] for _ in range(8)])

    async def go() -> None:
        client = EngineClient(graph, {Route.TEXT: graph})
        for _ in range(4):
            await asyncio.gather(*(client.compute([TEXTS[0]], 1) for _ in range(2)))
        assert not client._groups_at

    run(go)
    nodes = [node for node, *_ in graph.sent]
    assert all({first, second} == {"node-0", "node-1"} for first, second in zip(nodes[::2], nodes[1::2], strict=True))


@pytest.mark.parametrize(
    "end",
    [
        Overloaded("the queue is full", 7.0, "max_queue"),
        Unavailable("this node is drained", 7.0),
        TokenChunk((), FinishReason.ERROR, "shutting down", retry_after_s=7.0),
        TokenChunk((), FinishReason.MOVED),
    ],
)
def test_a_group_of_which_an_engine_refuses_a_text_goes_on_at_another_one_or_fails_with_retry_after(end):
    graph = Graph(streams=[[ends(0), ended(1, end)], [ends(0, 1, 2)]])
    assert graph.compute(TEXTS) == [b"   0", b"   0", b"   1", b"   2"]
    assert graph.sent[1][1] == NAMES[1:]
    alone = Graph(streams=[[ends(0), ended(1, end)]], num_engines=1)
    with pytest.raises((Overloaded, Unavailable)) as error:
        alone.compute(TEXTS)
    assert error.value.retry_after_s >= 1 and len(alone.sent) == 1


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ContextLengthExceeded(9, 0, 8), ContextLengthExceeded),
        (InvalidRequest("no"), InvalidRequest),
        (TokenChunk((), FinishReason.ERROR, "the step failed"), EngineFailed),
        (TokenChunk((), FinishReason.ABORT), Cancelled),
        (TokenChunk((), FinishReason.STOP), EngineFailed),
    ],
)
def test_an_error_of_one_text_is_final_and_names_it(end, kind):
    graph = Graph(streams=[[ends(0), ended(2, end), ends(1, 3)]])
    with pytest.raises(kind) as error:
        graph.compute(TEXTS)
    assert len(graph.sent) == 1 and graph.log[-1] == "cancel"
    if isinstance(error.value, InvalidRequest):
        assert error.value.field == "input[2]"


def test_an_error_of_the_planner_names_its_text_also_among_those_left():
    too_long = ContextLengthExceeded(9, 0, 8)
    graph = Graph(unplannable={"e-1": too_long})
    with pytest.raises(ContextLengthExceeded) as error:
        graph.compute(TEXTS)
    assert error.value.field == "input[1]" and not graph.sent
    graph = Graph(streams=[[ends(0, 1), ActorDiedError()]])

    def fail_later(texts: Sequence[ChatRequest]) -> list[EngineRequest | OrchardError]:
        graph.unplannable = {"e-3": InvalidRequest("no")} if len(texts) == 2 else {}
        return Graph.planned(graph, texts)

    graph.planned = fail_later
    with pytest.raises(InvalidRequest) as other:
        graph.compute(TEXTS)
    assert other.value.field == "input[3]"


def test_a_planner_that_raises_is_answered_as_for_one_request():
    class Failing(Graph):
        def planned(self, texts: Sequence[ChatRequest]) -> Any:
            return task_error(Unavailable("no worker", 3.0))

    graph = Failing()
    with pytest.raises(Unavailable, match="no worker"):
        graph.compute(TEXTS)
    assert graph.log == ["plan", "plan"] and not graph.sent


def test_an_engine_that_ends_the_call_too_early_has_failed():
    with pytest.raises(EngineFailed, match="before their last result"):
        Graph(streams=[[ends(0, 1)]]).compute(TEXTS)


def test_a_silent_engine_is_replaced():
    graph = Graph(streams=[[ends(3), 3600.0], [ends(0, 1, 2)]])
    assert graph.compute(TEXTS, silence_limit_s=0.05) == [b"   0", b"   1", b"   2", b"   3"]


def test_a_plan_for_another_checkpoint_is_refused_before_the_dispatch():
    graph = Graph(checkpoint="new")
    with pytest.raises(Unavailable, match="The model is being replaced"):
        graph.compute(TEXTS, checkpoint="old")
    assert not graph.sent


def test_a_client_that_leaves_cancels_the_call():
    graph: Any = Graph(streams=[[ends(0), 3600.0]])

    async def go() -> None:
        task = asyncio.ensure_future(EngineClient(graph, {Route.TEXT: graph}).compute(TEXTS, 3, 5))
        while not graph.sent:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(go)
    assert graph.log == ["plan", "cancel"]


@pytest.fixture(scope="module")
def local_graph() -> Iterator[tuple[Any, Any]]:
    config = EngineConfig(dtype="float32")
    with cold_engines():
        engine = serve.run(ModelReplica.bind(config), name="engine", _local_testing_mode=True)
        yield engine, serve.run(TextMTP.bind(AppArgs(engine=config)), name="text", _local_testing_mode=True)
        engine.options(method_name="__del__").remote().result()  # as Serve does; the local mode forgets it


def test_a_real_engine_embeds_texts_in_a_group_as_each_alone_bit_for_bit(local_graph: tuple[Any, Any]):
    engine, planner = local_graph
    texts = [text(i, "a story " * (1 + i % 4) + str(i)) for i in range(40)]  # so short that none is divided

    async def go() -> tuple[TextResults, list[TextResults]]:
        client = EngineClient(engine, {Route.TEXT: planner})
        return await each(texts, client.compute, 4), [await client.compute([one], 1) for one in texts]

    together, alone = run(go)
    assert together == [result for [result] in alone] and len({vector for vector, _ in together}) == len(texts)


def test_an_invalid_text_of_a_group_is_named_through_serve(local_graph: tuple[Any, Any]):
    engine, planner = local_graph

    async def go() -> None:
        texts = [text(0), text(1, "apple " * 100_000), text(2)]
        await each(texts, EngineClient(engine, {Route.TEXT: planner}).compute, 4)

    with pytest.raises(ContextLengthExceeded, match="maximum context length") as error:
        run(go)
    assert error.value.field == "input[1]"
