"""RayMirror: shows the engine's metrics among those of Ray, on each node's metrics port.

Names have `_` in the place of `:` there, and Ray puts `ray_` in front. vLLM's names fill Ray's dashboard "Serve LLM".
Ray's histograms take single values, so a histogram is mirrored only if the timeline of a choice tells its value; those
between tokens and of steps are in `GET /metrics` alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ray.serve import metrics as ray_metrics

from deployments.metrics.catalog import METRICS
from deployments.metrics.metric import Metric
from deployments.metrics.node_figures import NodeFigures
from deployments.metrics.text_format import common_values
from engine.ended_rows import EndedRows
from engine.figures import EngineFigures
from engine.histogram import Histogram
from engine.timeline import RowTimeline

log = logging.getLogger("ray.serve")

PERIOD_S = 1.0


class Mirrored(Protocol):
    """The part of AsyncEngine that is mirrored."""

    def figures(self) -> EngineFigures: ...

    @property
    def ended(self) -> EndedRows: ...


class RayMirror:
    """Copies an engine's metrics to Ray. A metric exists there from its first sample on.

    Args:
        model: Name under which the model is served.
        metrics: The metrics.
        kinds: Has the classes Counter, Gauge and Histogram of Ray.
        engine_number: Number of the engine on its node.
    """

    def __init__(
        self,
        model: str,
        metrics: Sequence[Metric] = METRICS,
        kinds: Any = ray_metrics,
        engine_number: str = "0",
    ):
        self._model = model
        self._engine_number = engine_number
        self._metrics = metrics
        self._kinds = kinds
        self._there: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self, figures: EngineFigures, ended: Sequence[RowTimeline]) -> None:
        """Set Ray's metrics to the figures.

        Args:
            figures: The engine's figures.
            ended: The choices that have ended since the last update.
        """
        node = NodeFigures(model=self._model, engine=figures, engine_number=self._engine_number)
        is_first = self._engine_number == "0"
        for metric in (one for one in self._metrics if is_first or not one.is_of_machine):
            for values, value in metric.read(node):
                tags = dict(zip(_tag_keys(metric), (*common_values(metric, node), *values), strict=True))
                if isinstance(value, Histogram):
                    self._observe(metric, value, ended, tags)
                elif metric.kind == "counter":
                    self._count(metric, values, value, tags)
                else:
                    self._of(metric, self._kinds.Gauge).set(float(value), tags)

    def _observe(
        self, metric: Metric, histogram: Histogram, ended: Sequence[RowTimeline], tags: dict[str, str]
    ) -> None:
        if metric.of_choice is None:
            return
        mirrored = self._of(metric, self._kinds.Histogram, boundaries=list(map(float, histogram.bounds)))
        for choice in ended:
            if (value := metric.of_choice(choice)) is not None:
                mirrored.observe(float(value), tags)

    def _count(self, metric: Metric, values: tuple[str, ...], value: float, tags: dict[str, str]) -> None:
        more = value - self._counted.get((metric.name, values), 0)
        mirrored = self._of(metric, self._kinds.Counter)
        if more > 0:
            mirrored.inc(float(more), tags)
            self._counted[metric.name, values] = value

    def _of(self, metric: Metric, kind: Callable[..., Any], **more: Any) -> Any:
        if metric.name not in self._there:
            name = metric.name.replace(":", "_")
            self._there[metric.name] = kind(name, description=metric.help, tag_keys=_tag_keys(metric), **more)
        return self._there[metric.name]


async def mirror_to_ray(engine: Mirrored, mirror: RayMirror, period_s: float = PERIOD_S) -> None:
    """Update the mirror for the life of this process. Errors are logged when they begin, and never raised."""
    is_failing = False
    while True:
        try:
            mirror.update(engine.figures(), engine.ended.take())
            is_failing = False
        except Exception:
            if not is_failing:  # said once, not as long as it lasts
                log.exception("the metrics could not be passed on to Ray; GET /metrics has them nevertheless")
            is_failing = True
        await asyncio.sleep(period_s)


def _tag_keys(metric: Metric) -> tuple[str, ...]:
    return (*metric.common_labels, *metric.labels)
