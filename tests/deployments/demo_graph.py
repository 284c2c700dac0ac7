"""DemoGraph: the whole graph with the demo model in one process, and a client on the same machine."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
import pytest
import yaml

from deployments.args import AppArgs
from tests.deployments.faulty_graph import Graph
from tests.e2e.server import SHIPPED_CONFIG
from tests.support.fake_runner import until
from tests.support.timelines import assert_sums

Body = dict[str, Any]


class DemoGraph:
    """The shipped configuration with changes.

    Args:
        tracing: The section `tracing`.
        is_warm: Whether the engine measures speed and memory when it starts, as a server's does.
        engine: Changes of the section `engine`.
    """

    def __init__(self, tracing: Mapping[str, Any] | None = None, is_warm: bool = False, **engine: Any):
        given = yaml.safe_load(SHIPPED_CONFIG.read_text())["applications"][0]["args"]
        given["engine"] |= {"memory": {"min_available_gb": 0}, **engine}
        given |= {"tracing": tracing or {}}
        self._patch = pytest.MonkeyPatch()
        self._loop = asyncio.Runner()
        self.graph = Graph(AppArgs.model_validate(given), self._patch, is_warm)
        self._loop.run(self.graph.start())
        transport = httpx.ASGITransport(self.graph.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=120)

    def run(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self._loop.run(test())

    def close(self) -> None:
        self._loop.run(self.http.aclose())
        self._loop.run(self.graph.close())
        self._loop.close()
        self._patch.undo()

    async def ask(
        self, id: str, content: Any, traceparent: str | None = None, **more: Any
    ) -> tuple[httpx.Response, float]:
        """Return the answer, and the seconds that the client measured."""
        messages = (
            content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
        )
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8, **more}
        headers = {"x-request-id": id} | ({"traceparent": traceparent} if traceparent else {})
        began_s = time.monotonic()
        answer = await self.http.post("/v1/chat/completions", json=body, headers=headers)
        return answer, time.monotonic() - began_s

    async def timeline(self, id: str) -> Body:
        answer = await self.http.get(f"/v1/requests/{id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def told(self, id: str, content: Any, **more: Any) -> Body:
        """Ask, and return the timeline, which must agree with what the client saw."""
        answer, seconds = await self.ask(id, content, **more)
        told = await self.timeline(id)
        assert_sums(told, seconds)
        assert told["status"] == answer.status_code
        return told

    async def is_decoding(self) -> None:
        await until(lambda: self.graph.engine.status().num_output_tokens > self.before + 2, 60.0)

    @property
    def before(self) -> int:
        return self._before

    def note(self) -> None:
        self._before = self.graph.engine.status().num_output_tokens
