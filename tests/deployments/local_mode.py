"""A graph in Serve's local testing mode: ingress, planner of texts and engine of one checkpoint in one process."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from deployments.args import AppArgs
from deployments.http.config import HttpConfig
from deployments.ingress import Ingress
from deployments.model_replica import ModelReplica
from deployments.planners.text import TextMTP
from engine.config import EngineConfig


class Here(Ingress.func_or_class):  # type: ignore[misc, name-defined]
    def __del__(self) -> None:
        """Serve awaits the one of the ingress; here nothing does."""


def serving(
    path: Path,
    name: str,
    test: Callable[[httpx.AsyncClient], Awaitable[None]],
    http: HttpConfig | None = None,
    **engine_options: Any,
) -> None:
    """Run the test with a client of a graph of this name that serves this checkpoint in this process."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", **engine_options)
    engine = serve.run(ModelReplica.bind(config), name=f"{name}-engine", _local_testing_mode=True)
    text = serve.run(TextMTP.bind(AppArgs(engine=config)), name=f"{name}-text", _local_testing_mode=True)

    async def go() -> None:
        here: Any = Here.__new__(Here)
        await here.__init__(AppArgs(engine=config, http=http or HttpConfig()), {}, engine, text, text)
        here._graph._ready_until = float("inf")
        transport = httpx.ASGITransport(here.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await test(client)

    asyncio.run(go())
    engine.options(method_name="__del__").remote().result()  # as Serve does; the local mode forgets it
