"""Two sets of tests: the gate, which `pytest` runs, and the night, which holds all tests: `pytest --night`.

A test is in the night alone if it has the mark `night`, which gives the reason:

    @pytest.mark.night("one family of each cache layout runs in the gate")

A file whose `pytestmark` has the mark is not even imported by the gate.

Ray reads its environment when it is imported: what `serve` and `ray` get when they start, the tests get here.

With several processes of tests (pytest -n) each computes on one core: products that wait for a thread which another
process keeps from running take ten times as long. Run alone, tests compute with as many threads as a server.
"""

import gc
import logging
import os
import re
import socketserver
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx._transports import default as httpx_transports
from hypothesis import settings

from deployments.serve_run.environment import set_defaults
from tests.schedule.durations import CpuMeter, Recorder, longest_first, recorded
from tests.schedule.groups import SERVERS, group_of

set_defaults()
# `shutdown` waits for the end of a poll: 0.5 s by default, longer than most tests of a cluster's servers need.
socketserver.BaseServer.serve_forever.__defaults__ = (0.02,)
# Each client of httpx reads the certificates of all authorities, which takes 65 ms of a slow core, also for HTTP.
httpx_transports.create_ssl_context = cache(httpx.create_ssl_context)  # pyright: ignore[reportPrivateImportUsage]
# An example that takes 0.2 s fails by default; on a busy machine any does, now and then.
settings.register_profile("orchard", deadline=None)
settings.load_profile("orchard")
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["tests.support.demo_model"]

NICENESS = 10
"""Niceness of a process whose tests need no server, so that a server beside it gets most of the processor time."""

_NIGHT_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.night\(", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", action="store_true", help="run all tests, also those with the mark `night`")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "durations")
    config.pluginmanager.register(CpuMeter(), "cpu meter")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of the night without importing them."""
    if config.option.night or not collection_path.match("test_*.py"):
        return None
    return True if _NIGHT_FILE.search(collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during imports, and leave what is imported out of every later collection.

    These are 450,000 objects, which take 0.3 s each time: many tests and each runner that is closed collect garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Leave what a file's tests have left out of every later collection; some files unfreeze what was frozen before.

    A start of a runner and an end of one collect all garbage, which takes 0.5 s if they visit what was imported.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


@pytest.fixture(autouse=True)
def own_log() -> Generator[None]:
    """Undo what a test did to Orchard's loggers: a graph joins them to Serve's, the engine's command sets a level."""
    yield
    logging.getLogger("orchard").parent = logging.getLogger()
    logging.getLogger("orchard.engine").setLevel(logging.NOTSET)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let servers go first: beside three processes of tests they take minutes to start, alone half a minute."""
    is_beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 and group_of(item.nodeid) != SERVERS
    if is_beside and os.nice(0) == 0:
        os.nice(NICENESS)
        if sys.platform == "linux":
            # MLX's thread wakes at each operation and would interrupt the one that adds more: up to a fifth of time.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.schedule.longest_first import LongestFirstScheduling  # without pytest-xdist it cannot be imported

    return LongestFirstScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the night unless they are asked for, and order the groups of tests by recorded seconds."""
    chosen: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("night")
        if mark is not None and not (len(mark.args) == 1 and isinstance(mark.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: the mark `night` needs its reason")
        (deselected if mark is not None and not config.option.night else chosen).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = longest_first(chosen, recorded())
