"""How metrics are read from the figures of a node."""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from deployments.metrics.metric import Sample
from deployments.metrics.node_figures import IngressFigures, NodeFigures
from engine.core.request_figures import RequestFigures
from engine.core.spec_prefill.plan import ScorerStatus
from engine.figures import EngineFigures
from engine.histogram import Histogram
from engine.timeline import RowTimeline

Read = Callable[[NodeFigures], Iterable[Sample]]
OfChoice = Callable[[RowTimeline], float | None]


def engine_value(value: Callable[[EngineFigures], float | Histogram | None]) -> Read:
    """Read one value of the engine; no sample if it is None."""

    def read(node: NodeFigures) -> Iterable[Sample]:
        found = None if node.engine is None else value(node.engine)
        return () if found is None else [((), found)]

    return read


def engine_values(values: Callable[[EngineFigures], Mapping[str, float]]) -> Read:
    """Read the values of the engine by the value of the only label."""
    return lambda node: () if node.engine is None else _by_label(values(node.engine))


def of_requests(value: Callable[[RequestFigures], float | Histogram]) -> Read:
    """Read one value of the engine's figures of requests."""
    return engine_value(lambda engine: value(engine.requests))


def scorer_value(value: Callable[[ScorerStatus], float]) -> Read:
    """Read one value of the scorer."""
    return lambda node: () if node.scorer is None else [((), value(node.scorer))]


def ingress_value(value: Callable[[IngressFigures], float]) -> Read:
    """Read one value of the ingress."""
    return lambda node: () if node.ingress is None else [((), value(node.ingress))]


def ingress_samples(samples: Callable[[IngressFigures], Iterable[Sample]]) -> Read:
    """Read samples of the ingress."""
    return lambda node: () if node.ingress is None else samples(node.ingress)


def with_answer(value: OfChoice) -> OfChoice:
    """Take the value only of choices with a complete answer, as RequestFigures.ended does."""
    return lambda choice: value(choice) if choice.is_complete else None


def counts(reasons: object, found: Mapping[str, int]) -> Mapping[str, float]:
    """Return the counts of all values of a Literal, also of those that were never counted."""
    return {reason: found.get(reason, 0) for reason in get_args(reasons)}


def _by_label(values: Mapping[str, float]) -> Iterable[Sample]:
    return [((label,), value) for label, value in values.items()]
