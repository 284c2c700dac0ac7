"""The whole graph in one process: real replicas with a tiny model, behind handles that act as Ray's do and have seams.

Each replica's method runs in a task of its own, as it would in its process: it goes on until it is done or cancelled,
whoever waits for it. Errors of a replica arrive wrapped, those of Ray as they are.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from PIL import Image
from ray.exceptions import ActorDiedError
from ray.serve import Deployment

from deployments import ingress, model_replica, prompt_scorer
from deployments.args import AppArgs
from deployments.calls.replica_calls import cause_of
from deployments.dispatch.engine_client import EngineClient
from deployments.ingress import Ingress
from deployments.model_replica import ModelReplica
from deployments.planners import planner
from deployments.planners.mllm import MLLM
from deployments.planners.text import TextMTP
from deployments.prompt_scorer import SpecPrefillScorer
from engine import async_engine
from engine.config import EngineConfig
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.model_runner import load_runner
from tests.deployments.fake_handle import FakeCall, FakeHandle, running, task_error
from tests.support.cold_runner import load_cold
from tests.support.fake_runner import until
from tests.support.faults import Faults
from tests.support.faulty_engine import FaultyEngine

NODE = "here"
MODEL = "tiny"
PATIENT_S = 60.0
DEADLINE_S = 60.0
"""For what takes a fraction of a second on an idle machine."""


def bare(deployment: Deployment) -> Any:
    """Its class, without the end that Serve awaits: here `Graph.close` does."""
    origin: Any = deployment.func_or_class

    class Replica(origin):
        async def __init__(self, *arguments: Any, **options: Any):
            made = super().__init__(*arguments, **options)
            if made is not None:
                await made

        def __del__(self) -> None:
            """Nobody could await the one of the deployment."""

    return Replica


async def make(deployment: Deployment, *arguments: Any, **options: Any) -> Any:
    kind = bare(deployment)
    replica = kind.__new__(kind)
    await replica.__init__(*arguments, **options)
    return replica


class Call(FakeCall):
    """One call of a replica, under way: what a handle's `remote` and `dispatch` give."""

    def __init__(self, graph: "Graph", work: Coroutine[Any, Any, Any]):
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody waits any more
        super().__init__(on_cancel=self._task.cancel)
        graph.calls.add(self._task)
        self._task.add_done_callback(graph.calls.discard)

    async def get_async(self) -> Any:
        return await asyncio.shield(self._task)

    def cancel(self) -> None:
        self._task.cancel()


class Stream(Call):
    """Seam `chunk`: somebody waits for the next one."""

    def __init__(self, graph: "Graph", chunks: Any):
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._graph = graph
        self._is_read = False
        super().__init__(graph, self._pump(chunks))

    async def _pump(self, chunks: Any) -> None:
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._queue.put_nowait(chunk)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._queue.put_nowait(task_error(error))

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        self._is_read = True
        with self._graph.replacing_lost():
            await self._graph.faults.reach("chunk", "before")
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Like Ray's, it does not reach a call that nobody has read from."""
        if self._is_read:
            super().cancel()


@dataclass
class Handle(FakeHandle):
    """Seams: `dispatch <name>` (at once, of a request), `<name>.<method>` (in the replica)."""

    graph: "Graph"
    name: str

    def running(self) -> dict[str, Any]:
        """There is one replica; after the loss of one it is another one."""
        (replica,) = running(NODE).values()
        replica.replica_id.unique_id = f"replica {self.graph.num_lost}"
        return {"": replica}

    def call(self, *arguments: Any) -> Call:
        method = self.chosen["method_name"]
        call = getattr(self.graph.replicas[self.name], method)
        if method in ("generate", "score"):
            with self.graph.replacing_lost():
                self.graph.faults.at(f"dispatch {self.name}", "before")
        if self.chosen.get("stream"):
            return Stream(self.graph, call(*arguments))
        return Call(self.graph, self._run(method, call, arguments))

    async def _run(self, method: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self.graph.replacing_lost():
            await self.graph.faults.reach(f"{self.name}.{method}", "before")
        try:
            return await call(*arguments)
        except Exception as error:
            raise task_error(error) from None

    async def results(self, method: str, *arguments: Any) -> list[Call]:
        """The answer of the one replica that there is."""
        return [self.options(method_name=method).call(*arguments)]


class Graph:
    """replicas: by name. num_lost: losses of replicas so far. calls: that run now. is_warm: the engine's start."""

    def __init__(self, args: AppArgs, monkeypatch: pytest.MonkeyPatch, is_warm: bool = False):
        self._make_runner = load_runner if is_warm else lambda config, progress: load_cold(config)
        self.faults = Faults()
        self.replicas: dict[str, Any] = {}
        self.num_lost = 0
        self.calls: set[asyncio.Task[Any]] = set()
        self._args = args
        info = {"node_id": NODE, "replica_id": "r", "pid": 7}
        for module in (model_replica, prompt_scorer, ingress, planner):
            monkeypatch.setattr(module, "replica_info", lambda: info)

    async def start(self) -> None:
        config, sparse = self._args.engine, self._args.spec_prefill

        def faulty(config: EngineConfig, sharing: Any) -> FaultyEngine:
            return FaultyEngine(config, self.faults, self._make_runner)

        with pytest.MonkeyPatch.context() as patch:  # other tests have engines of their own while this graph serves
            patch.setattr(async_engine, "AsyncEngine", faulty)
            self.replicas["engine"] = await make(ModelReplica, config)
        self.replicas["scorer"] = await make(SpecPrefillScorer, sparse, config)
        handles = Handle(self, "engine"), Handle(self, "scorer")
        self.replicas["text"] = await make(TextMTP, self._args, *handles)
        self.replicas["mllm"] = await make(MLLM, self._args, *handles)
        self.app = await self.ingress()

    async def ingress(self, engine_timeout_s: float = PATIENT_S, plan_timeout_s: float = PATIENT_S) -> FastAPI:
        """The HTTP app of an ingress that waits no longer than that."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingress, "EngineClient", partial(EngineClient, engine_timeout_s=engine_timeout_s))
            handles = [Handle(self, name) for name in ("engine", "text", "mllm", "scorer")]
            patch.setattr(ingress, "plan_timeout_s", lambda args: plan_timeout_s)
            replica = await make(Ingress, self._args, {}, *handles)
        self.replicas["ingress"] = replica
        return replica.__serve_build_asgi_app__()

    @contextlib.contextmanager
    def replacing_lost(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.num_lost += isinstance(cause_of(error), ActorDiedError)
            raise

    @property
    def engine(self) -> FaultyEngine:
        return self.replicas["engine"]._engine

    async def assert_nothing_is_left(self) -> None:
        def is_left() -> dict[str, Any]:
            status = self.engine.status()
            return {
                "calls": len(self.calls),
                "choices in flight": self.replicas["ingress"].in_flight.status()["num_in_flight"],
                "rows": status.num_running + status.num_waiting,
                "bytes": status.memory["decode_cache_bytes"] + status.memory["prefill_cache_bytes"],
                "reserved": status.admission["reserved_bytes"] + status.admission["row_bytes"],
                "scoring": self.replicas["scorer"]._scorer.status().num_running,
            }

        with contextlib.suppress(TimeoutError):
            await until(lambda: not any(is_left().values()), 10.0)
        assert not any(is_left().values()), is_left()

    async def close(self) -> None:
        for name, deployment in (("engine", ModelReplica), ("scorer", SpecPrefillScorer)):
            origin: Any = deployment.func_or_class
            await origin.__del__(self.replicas[name])


class Client:
    """One HTTP request, raw; the app sees the client leave with `leave`."""

    def __init__(self, app: FastAPI, path: str, body: Mapping[str, Any], request_id: str = "mine"):
        self.sent: list[Any] = []
        self._app = app
        self._left = asyncio.Event()
        self._messages: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        }
        self.task = asyncio.ensure_future(self._talk())

    async def _talk(self) -> "Client":
        async def send(message: Any) -> None:
            self.sent.append(message)

        await self._app(self._scope, self._receive, send)
        return self

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def body(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return json.loads(self.text)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE]."""
        blocks = [block.removeprefix("data: ") for block in self.text.split("\n\n") if block]
        return [json.loads(block) for block in blocks if block != "[DONE]"]

    @property
    def error(self) -> dict[str, Any]:
        """The error of a response, or of the last event of a stream."""
        return (self.events[-1] if "event-stream" in self.headers["content-type"] else self.body)["error"]


SALTS = count()

WORDS = "the baker of oakdale sold bread apples and pears to his neighbours "


def picture_url() -> str:
    buffer = BytesIO()
    Image.new("RGB", (32, 32), "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


PICTURE = [
    {"type": "image_url", "image_url": {"url": picture_url()}},
    {"type": "text", "text": "what is in the image?"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"content": "what is 12 + 30?"},
    "picture": {"content": PICTURE},
    "long": {"content": WORDS * 20, "specprefill": True},
}


class Bench:
    """A graph on a loop of its own, and what requests get from it undisturbed."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **engine: Any):
        self._loop = asyncio.Runner()
        config = EngineConfig.model_validate({"model": str(path), "memory": {"min_available_gb": 0}, **engine})
        sparse = SpecPrefillConfig(enabled=True, draft_model=config.model, deadline_s=2.0)
        args = AppArgs(engine=config, spec_prefill=sparse, served_model_name=MODEL)
        self.graph = Graph(args, monkeypatch)
        self.faults = self.graph.faults
        self._loop.run(self.graph.start())

    def warm(self) -> "Bench":
        """Learns what undisturbed requests get."""
        self.texts = {kind: self.run(lambda kind=kind: self.whole(kind)) for kind in REQUESTS}
        self.dense = self.run(lambda: self.whole("long", specprefill=False))
        return self

    def run(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await test()

        try:
            return self._loop.run(bounded())
        finally:
            self.faults.clear()

    def close(self) -> None:
        self._loop.run(self.graph.close())
        self._loop.close()

    def ask(self, kind: str, app: FastAPI | None = None, **fields: Any) -> Client:
        asked = dict(REQUESTS[kind])
        messages = [{"role": "user", "content": asked.pop("content")}]
        sampling = {"temperature": 0, "max_tokens": 16, "min_tokens": 16}
        salt = {"cache_salt": str(next(SALTS))}  # a prompt that is cached need not be scored
        body = {"model": MODEL, "messages": messages, **salt, **sampling, **asked, **fields}
        return Client(app or self.graph.app, "/v1/chat/completions", body)

    async def answered(self, client: Client) -> Client:
        async with asyncio.timeout(DEADLINE_S):
            return await client.task

    async def whole(self, kind: str, **fields: Any) -> str:
        client = await self.answered(self.ask(kind, **fields))
        assert client.status == 200, client.text
        return client.body["choices"][0]["message"]["content"]

    async def cancel(self) -> Client:
        return await self.answered(Client(self.graph.app, "/v1/chat/completions/mine/cancel", {}, "canceller"))

    @contextlib.asynccontextmanager
    async def num_freed(self, num_rows: int) -> AsyncIterator[None]:
        """So many rows are freed meanwhile before they have come to their end."""
        before = self.graph.engine.status().num_aborted
        yield
        assert self.graph.engine.status().num_aborted == before + num_rows

    async def check(self) -> None:
        """Nothing is left, and all is served as before."""
        self.faults.clear()
        await self.graph.assert_nothing_is_left()
        assert await self.whole("text") == self.texts["text"]
