"""A server without any watching, for comparison: its PYTHONPATH has this folder.

Rows and requests record no phases, histograms count nothing, no request is logged, and nothing is mirrored to Ray.
Python imports this module in every process of such a server.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a method that records."""


async def _no_task(*args: Any, **kwargs: Any) -> None:
    """Stand in for a task that mirrors."""


def _quiet_recorder(module: Any) -> None:
    for name in ("queued", "blocked", "admitted", "restored", "encoded", "computed", "joined", "token", "stepped"):
        setattr(module.TimelineRecorder, name, _nothing)


def _quiet_histogram(module: Any) -> None:
    module.Histogram.observe = _nothing


def _quiet_figures(module: Any) -> None:
    module.RequestFigures.ended = module.RequestFigures.prompt_done = _nothing


def _quiet_timeline(module: Any) -> None:
    module.RequestTimeline.lap = module.RequestTimeline.add_row = _nothing
    module.Timelines.keep = _nothing


def _quiet_line(module: Any) -> None:
    module.told = _nothing
    module.logger.info = _nothing


def _quiet_mirror(module: Any) -> None:
    module.mirror_to_ray = _no_task


QUIET: dict[str, Callable[[Any], None]] = {
    "engine.core.timeline_recorder": _quiet_recorder,
    "engine.core.request_figures": _quiet_figures,
    "engine.histogram": _quiet_histogram,
    "deployments.http.timeline": _quiet_timeline,
    "deployments.http.answer_response": _quiet_line,
    "deployments.status.ray_mirror": _quiet_mirror,
}


class Quiet(MetaPathFinder, Loader):
    """Imports a module of QUIET, and makes it record nothing."""

    def __init__(self) -> None:
        self._loaders: dict[str, Loader] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in QUIET or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        QUIET[module.__name__](module)


sys.meta_path.insert(0, Quiet())
