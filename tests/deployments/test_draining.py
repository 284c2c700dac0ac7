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
from deployments.draining import on_stop
from engine.errors import EngineFailed

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


@pytest.mark.night("a start of Ray; the name it relies on is in test_ray_internals.py")
def test_replicas_of_a_real_ray_answer_broadcasts_and_notice_their_shutdown():
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


def test_drain_action_runs_once_when_serve_stops_the_replica(replica: FakeReplica):
    async def go() -> list[str]:
        done: list[str] = []

        async def act() -> None:
            done.append("drained")

        task = on_stop(act)
        assert task is not None
        await asyncio.sleep(0.02)
        assert done == []
        replica._shutting_down = True
        async with asyncio.timeout(60):
            await task
        return done

    assert asyncio.run(go()) == ["drained"]


def test_failure_of_the_drain_action_is_logged(replica: FakeReplica, caplog: pytest.LogCaptureFixture):
    async def go() -> None:
        async def act() -> None:
            raise ZeroDivisionError("oops")

        replica._shutting_down = True
        task = on_stop(act)
        assert task is not None
        await task

    asyncio.run(go())
    assert "could not be drained" in caplog.text and "oops" in caplog.text


def test_drain_action_is_not_scheduled_outside_a_replica():
    assert on_stop(nothing) is None


@pytest.mark.parametrize(
    "actor",
    [None, SimpleNamespace(), SimpleNamespace(_replica_impl=SimpleNamespace(_shutting_down="maybe"))],
)
@pytest.mark.usefixtures("replica")
def test_ray_without_the_expected_shutdown_flag_fails_the_start_of_the_replica(
    actor: Any, monkeypatch: pytest.MonkeyPatch
):
    pretend(monkeypatch, actor)
    with pytest.raises(EngineFailed, match=r"does not support Ray [\d.]+: the replica has no flag"):
        on_stop(nothing)
