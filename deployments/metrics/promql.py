"""Query: a question to Prometheus about metrics of the catalog; a metric or label that it does not have is an error.

The queries read `GET /metrics` of the ingresses, not the copies of the engine's metrics that Ray exports: only an
ingress counts refusals, HTTP errors and API keys, and it answers also where Ray's dashboard is off.
"""

from dataclasses import dataclass
from functools import cache

from deployments.metrics.catalog import METRICS
from deployments.metrics.metric import Kind, Metric

INSTANCE = "instance"
"""The label with which Prometheus tells the nodes apart: the address that it has scraped."""

INTERVAL = "$__rate_interval"
"""Grafana's variable for the range of a rate: at least four scrapes."""

RANGE = "$__range"
"""Grafana's variable for the time that the dashboard shows."""

FILTER = f'{{model_name=~"$model", {INSTANCE}=~"$node"}}'
"""Selects by the variables of the dashboard."""


@dataclass(frozen=True)
class Query:
    """One query, and how its series are named."""

    expr: str
    """PromQL with Grafana's variables."""
    legend: str
    """Name of each series; `{{label}}` is replaced by the value of the label."""
    metrics: tuple[Metric, ...]
    """The metrics that it reads."""


def value(name: str, *by: str, legend: str | None = None) -> Query:
    """Return the sum of a gauge over all nodes, or for each value of the labels `by`."""
    metric = _metric(name, "gauge", by)
    return Query(f"{_sum(by)}({metric.name}{FILTER})", _legend(metric, by, legend), (metric,))


def rate(name: str, *by: str, legend: str | None = None) -> Query:
    """Return the growth of a counter per second, see `value`."""
    metric = _metric(name, "counter", by)
    return Query(_rate(metric, by), _legend(metric, by, legend), (metric,))


def increase(name: str, *by: str, within: str = INTERVAL, legend: str | None = None) -> Query:
    """Return the growth of a counter within a time, see `value`."""
    metric = _metric(name, "counter", by)
    expr = f"{_sum(by)}(increase({metric.name}_total{FILTER}[{within}]))"
    return Query(expr, _legend(metric, by, legend), (metric,))


def share(part: str, whole: str, *by: str, legend: str | None = None) -> Query:
    """Return the growth of one counter divided by that of another; no value while the other does not grow."""
    numerator, denominator = _metric(part, "counter", by), _metric(whole, "counter", by)
    expr = f"{_rate(numerator, by)} / ({_rate(denominator, by)} > 0)"
    return Query(expr, _legend(numerator, by, legend), (numerator, denominator))


def fraction(part: str, whole: str, *by: str, legend: str | None = None) -> Query:
    """Return the sum of one gauge divided by that of another; no value while the other is 0."""
    numerator, denominator = _metric(part, "gauge", by), _metric(whole, "gauge", by)
    expr = f"{_sum(by)}({numerator.name}{FILTER}) / ({_sum(by)}({denominator.name}{FILTER}) > 0)"
    return Query(expr, _legend(numerator, by, legend), (numerator, denominator))


def quantile(name: str, percent: int, *by: str, legend: str | None = None) -> Query:
    """Return a percentile of the values that a histogram has counted in the interval; no value without any."""
    metric = _metric(name, "histogram", by)
    buckets = f"{_sum(('le', *by))}(rate({metric.name}_bucket{FILTER}[{INTERVAL}]))"
    legend = f"p{percent}" if legend is None else f"{legend} p{percent}"
    return Query(f"histogram_quantile({percent / 100:g}, {buckets})", _legend(metric, by, legend), (metric,))


@cache
def _catalog() -> dict[str, Metric]:
    return {metric.name: metric for metric in METRICS}


def _metric(name: str, kind: Kind, by: tuple[str, ...]) -> Metric:
    metric = _catalog()[name]
    assert metric.kind == kind, f"{name} is a {metric.kind}, not a {kind}"
    unknown = {*by} - {*metric.common_labels, *metric.labels, INSTANCE}
    assert not unknown, f"{name} has no label {', '.join(sorted(unknown))}"
    return metric


def _rate(metric: Metric, by: tuple[str, ...]) -> str:
    return f"{_sum(by)}(rate({metric.name}_total{FILTER}[{INTERVAL}]))"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"


def _legend(metric: Metric, by: tuple[str, ...], legend: str | None) -> str:
    """Name a series by its labels, after the words of `legend`."""
    labels = " ".join(f"{{{{{label}}}}}" for label in by)
    words = legend if legend is not None or by else metric.name.partition(":")[2].replace("_", " ")
    return " ".join(filter(None, (words, labels)))
