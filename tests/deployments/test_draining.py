"""A replica hears that Serve is about to stop it, as Ray has no word for that of its own."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import draining
from deployments.draining import when_stopping
from engine.protocol import EngineFailed

ROOT = Path(__file__).parent.parent.parent
STARTED_S = 240.0  # a Ray starts in ten seconds on two idle cores


async def nothing() -> None: ...


class FakeReplica:
    def __init__(self) -> None:
        self._shutting_down = False


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> FakeReplica:
    """As if this process were that replica."""
    replica = FakeReplica()
    monkeypatch.setattr(draining, "in_replica", lambda: True)
    monkeypatch.setattr(draining, "LOOKED_EVERY_S", 0.001)
    pretend(monkeypatch, SimpleNamespace(_replica_impl=replica))
    return replica


def pretend(monkeypatch: pytest.MonkeyPatch, actor: Any) -> None:
    worker = SimpleNamespace(actor_id=7, actors={7: actor})
    monkeypatch.setattr("ray._private.worker.global_worker", worker)


def test_real_replicas_hear_that_serve_stops_them_and_who_of_them_answers():
    temp_dir = tempfile.mkdtemp(prefix="orc-", dir="/tmp")  # socket paths must stay short
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**inherited, "RAY_TMPDIR": temp_dir, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deployments.stopped_replica"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=STARTED_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        shutil.rmtree(temp_dir, ignore_errors=True)
    assert "heard that it is stopped" in said, complaints[-4000:]


def test_it_is_done_once_when_serve_stops_the_replica(replica: FakeReplica):
    async def go() -> list[str]:
        done: list[str] = []

        async def act() -> None:
            done.append("drained")

        task = when_stopping(act)
        assert task is not None
        await asyncio.sleep(0.02)
        assert done == []
        replica._shutting_down = True
        async with asyncio.timeout(10):
            await task
        return done

    assert asyncio.run(go()) == ["drained"]


def test_what_goes_wrong_with_it_is_in_the_log(replica: FakeReplica, caplog: pytest.LogCaptureFixture):
    async def go() -> None:
        async def act() -> None:
            raise ZeroDivisionError("oops")

        replica._shutting_down = True
        task = when_stopping(act)
        assert task is not None
        await task

    asyncio.run(go())
    assert "could not be drained" in caplog.text and "oops" in caplog.text


def test_without_a_replica_nothing_is_watched():
    assert when_stopping(nothing) is None


@pytest.mark.parametrize(
    "actor",
    [None, SimpleNamespace(), SimpleNamespace(_replica_impl=SimpleNamespace(_shutting_down="maybe"))],
)
@pytest.mark.usefixtures("replica")
def test_a_ray_that_does_it_in_another_way_is_found_out_when_the_replica_starts(
    actor: Any, monkeypatch: pytest.MonkeyPatch
):
    pretend(monkeypatch, actor)
    with pytest.raises(EngineFailed, match=r"Ray [\d.]+ does not say"):
        when_stopping(nothing)
