"""Calls of EngineClient to all engines at once: each answers for itself, and silent engines are named."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.dispatch.engine_client import EngineClient
from deployments.requests import EngineAnswer, SilentEngine
from engine.errors import EngineFailed
from tests.deployments.dispatch.test_engine_client import run
from tests.deployments.fake_handle import FakeCall, FakeHandle, task_error


@dataclass
class Engines(FakeHandle):
    """Handles of one engine per node. says: its answer, seconds to wait, or an error to raise."""

    says: dict[str, Any]
    log: list[str] = field(default_factory=list)

    def call(self) -> FakeCall:
        session_id = self.chosen.get("session_id")
        self.log.append(f"{self.chosen['method_name']} {session_id}")
        return FakeCall(self.says[str(session_id).removeprefix("node:")], lambda: self.log.append("cancel plan"))

    async def ask(self, timeout_s: float = 0.05) -> tuple[list[EngineAnswer[Any]], list[SilentEngine]]:
        engines: Any = self
        return await EngineClient(engines, {}, ask_timeout_s=timeout_s).ask_all("cache_status", self.says)


def here(node_id: str) -> EngineAnswer[str]:
    return EngineAnswer(node_id, f"replica on {node_id}", "well")


def test_engine_of_every_node_is_asked():
    engines = Engines({"a": here("a"), "b": here("b")})
    assert run(engines.ask) == ([here("a"), here("b")], [])
    assert engines.log == ["cache_status node:a", "cache_status node:b"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (60.0, "no answer within 0.05 s"),
        (ActorDiedError(), "the engine was lost"),
        (task_error(EngineFailed("the engine is not ready: it is loading")), "the engine is not ready: it is loading"),
        (task_error(ZeroDivisionError("secret")), "the engine failed to answer"),
    ],
)
def test_silent_engine_is_named_and_the_other_engines_answer(outcome: Any, reason: str):
    engines = Engines({"a": here("a"), "b": outcome, "c": here("c")})
    assert run(engines.ask) == ([here("a"), here("c")], [SilentEngine("b", reason)])
    assert ("cancel plan" in engines.log) == isinstance(outcome, float), "the call is cancelled"


def test_engine_that_cancels_the_call_at_shutdown_is_named_as_silent():
    engines = Engines({"a": here("a"), "b": asyncio.CancelledError()})
    assert run(engines.ask) == ([here("a")], [SilentEngine("b", "the engine was lost")])


def test_silent_engines_are_waited_for_concurrently():
    began = time.monotonic()
    _, silent = run(lambda: Engines(dict.fromkeys("abcdef", 60.0)).ask(0.5))
    assert [engine.engine_id for engine in silent] == list("abcdef")
    assert time.monotonic() - began < 2
