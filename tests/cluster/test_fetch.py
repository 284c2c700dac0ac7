"""A conversation that leaves its node, or loses it, keeps its prefix: the other node fetches it, or has a copy."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import AppArgs, build_app
from deployments.dispatch.engine_client import EngineClient
from deployments.placement.conversation_keys import sketch_conversation
from deployments.requests import ChatRequest, Route
from tests.cluster.conftest import APP, NODE, OrchardCluster
from tests.e2e.server import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.night("test_async_engine_fetch.py keeps all but the way through Ray")]

OPTIONS = {"engine": {"prefix_cache": {"disk": {"path": "~/snapshots"}, "fetch": "on"}}}
STORY = " ".join(f"The {i}th apple is {'red' if i % 3 else 'green'} and costs {i} cents." for i in range(60))
QUESTION = {"role": "user", "content": f"{STORY} What is 12 + 30?"}


class TwoNodes(OrchardCluster):
    """Nodes with a home directory, and so a disk tier, of their own."""

    def __init__(self, temp_dir: str):
        homes = [Path(temp_dir) / f"home{i}" for i in range(2)]
        for home in homes:
            home.mkdir()
        nodes = [{**NODE, "env_vars": {"HOME": str(home)}} for home in homes]
        head = {**nodes[0], "include_dashboard": False, "dashboard_port": free_port(), "temp_dir": temp_dir}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self._cluster.add_node(**nodes[1])]
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        serve.start(proxy_location="Disabled")
        serve.run(build_app(AppArgs.model_validate(OPTIONS)), name=APP, route_prefix=None, blocking=False)


@pytest.fixture
def two_nodes() -> Iterator[TwoNodes]:
    Path("/tmp/ray").mkdir(exist_ok=True)
    temp_dir = tempfile.mkdtemp(prefix="orc-", dir="/tmp")
    try:
        cluster = TwoNodes(temp_dir)
        try:
            cluster.wait_settled(2, timeout_s=240)
            yield cluster
        finally:
            cluster.shutdown()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def asked(name: str, *messages: dict[str, str], **more: Any) -> ChatRequest:
    return ChatRequest(name, messages, sketch=sketch_conversation(messages), temperature=0, **more)


async def fetched(engine: EngineClient, node_id: str) -> int:
    """Return how many snapshots the engine on a node has fetched."""
    answers, silent = await engine.ask_all("cache_status", [node_id])
    assert not silent and answers[0].answer.fetch is not None
    assert set(answers[0].answer.fetch.failures) <= {"slow"}
    return answers[0].answer.fetch.num_fetched


def test_a_drained_nodes_conversations_and_answers_go_on_with_their_prefixes(two_nodes: TwoNodes):
    async def go() -> None:
        planners = {Route.TEXT: two_nodes.handle("TextMTP"), Route.MLLM: two_nodes.handle("MLLM")}
        engine = EngineClient(two_nodes.handle("ModelReplica"), planners)
        stream = await engine.start(asked("first", QUESTION, max_tokens=40, min_tokens=40), Route.TEXT)
        home = stream.node_id
        answer = [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]
        other = next(node_id for node_id in two_nodes.living_nodes() if node_id != home)
        assert answer and not await fetched(engine, other)

        follow_up = ({"role": "assistant", "content": "42"}, {"role": "user", "content": "And 5 + 5?"})
        moving = await engine.start(asked("moving", QUESTION, max_tokens=300, min_tokens=300), Route.TEXT)
        assert moving.node_id == home
        assert await engine.leave(home, is_back=False) is None
        chunks = [chunk async for chunk in moving]
        assert moving.node_id == other and len([t for chunk in chunks for t in chunk.token_ids]) == 300
        num_moved = await fetched(engine, other)
        assert num_moved > 0, "the answer went on behind the fetched prompt"

        stream = await engine.start(asked("second", QUESTION, *follow_up, max_tokens=5), Route.TEXT)
        chunks = [chunk async for chunk in stream]
        assert stream.node_id == other and chunks[0].num_cached > 300

    asyncio.run(asyncio.wait_for(go(), 240))


def test_a_killed_nodes_conversation_goes_on_behind_its_copy(two_nodes: TwoNodes):
    pids = two_nodes.worker_pids()

    async def go() -> None:
        planners = {Route.TEXT: two_nodes.handle("TextMTP"), Route.MLLM: two_nodes.handle("MLLM")}
        engine = EngineClient(two_nodes.handle("ModelReplica"), planners)
        follow_up = ({"role": "assistant", "content": "42"}, {"role": "user", "content": "And 5 + 5?"})
        home = next(iter(pids))
        other = next(node_id for node_id in two_nodes.living_nodes() if node_id != home)
        assert await engine.leave(other, is_back=False) is None
        first = asked("first", QUESTION, max_tokens=20, min_tokens=20)
        stream = await engine.start(first, Route.TEXT)
        assert [chunk async for chunk in stream] and first.keys is not None and stream.node_id == home
        assert await engine.leave(other, is_back=True) is None

        engine.replication.turn_ended(first.keys.conversation, home)
        assert engine.replication._copying is not None
        await engine.replication._copying
        answers, silent = await engine.ask_all("cache_status", [other])
        assert not silent and answers[0].answer.fetch is not None
        assert answers[0].answer.fetch.taken_over["replica"] > 0 and not answers[0].answer.fetch.not_taken_over

        two_nodes.kill_worker(home, pids[home])
        stream = await engine.start(asked("second", QUESTION, *follow_up, max_tokens=5), Route.TEXT)
        chunks = [chunk async for chunk in stream]
        assert stream.node_id == other and chunks[0].num_cached > 300

    asyncio.run(asyncio.wait_for(go(), 240))
