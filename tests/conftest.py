"""Ray reads its environment when it is imported: what `serve` and `ray` get when they start, the tests get here.

With several processes of tests (pytest -n) each computes on one core: products that wait for a thread which another
process keeps from running take ten times as long. Run alone, tests compute with as many threads as a server.
"""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from deployments.serve_run.environment import set_defaults

FOLDERS = {mark: Path(__file__).parent / folder for mark, folder in (("server", "e2e"), ("cluster", "cluster"))}

set_defaults()
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["tests.support.demo_model"]


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group the tests with servers; others are only distributed by `--dist load`."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.server_groups import ServerGroupScheduling  # without pytest-xdist it cannot be imported

    return ServerGroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that the commands in README.md would not find, as they name the folder of each mark."""
    for mark, folder in FOLDERS.items():
        lost = [item.nodeid for item in items if item.get_closest_marker(mark) and folder not in item.path.parents]
        if lost:
            raise pytest.UsageError(f"tests with the mark {mark} belong in {folder}: {lost}")
