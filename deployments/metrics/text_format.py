"""Writes metrics in Prometheus's text format.

The exposition of prometheus_client takes 5 to 9 ms of the ingress for a node with 560 lines, as it checks every label
of every sample again; this takes a tenth of that. prometheus_client's parser reads it back in the tests.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from deployments.metrics.metric import Metric
from deployments.metrics.node_figures import NodeFigures
from engine.histogram import Histogram


def text_of(metrics: Sequence[Metric], node: NodeFigures, engines: Sequence[NodeFigures] = ()) -> bytes:
    """Return the metrics of a node that have samples, in Prometheus's text format 0.0.4.

    Args:
        metrics: The metrics.
        node: The figures.
        engines: Those of the node's other engines.
    """
    return "".join(line for metric in metrics for line in _lines(metric, [node, *engines])).encode()


def common_values(metric: Metric, node: NodeFigures) -> tuple[str, ...]:
    """Return the values of a metric's common labels."""
    return (node.model, node.engine_number)[: len(metric.common_labels)]


def _lines(metric: Metric, nodes: Sequence[NodeFigures]) -> Iterable[str]:
    shown = nodes[:1] if metric.is_of_machine else nodes
    samples = [(common_values(metric, node), values, value) for node in shown for values, value in metric.read(node)]
    if not samples:
        return
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    yield f"# HELP {name} {_escaped(metric.help)}\n# TYPE {name} {metric.kind}\n"
    names = (*metric.common_labels, *metric.labels)
    for common, values, value in samples:
        labels = ",".join(f'{label}="{_quoted(text)}"' for label, text in zip(names, (*common, *values), strict=True))
        if isinstance(value, Histogram):
            yield from _histogram(name, labels, value)
        else:
            yield f"{name}{{{labels}}} {float(value)!r}\n"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterable[str]:
    """Yield the cumulative counts of the buckets, the number of values and their sum."""
    cumulative = list(accumulate(histogram.counts))
    for bound, count in zip((*map(float, histogram.bounds), "+Inf"), cumulative, strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count}\n'
    yield f"{name}_count{{{labels}}} {cumulative[-1]}\n{name}_sum{{{labels}}} {histogram.total!r}\n"


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
