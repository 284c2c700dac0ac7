"""Builds the reference of all metrics, deployments/METRICS.md, from the catalog."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.metrics.catalog import METRICS
from deployments.metrics.engine_metrics import (
    DRAFT_METRICS,
    MEMORY_METRICS,
    QUEUE_METRICS,
    SPARSE_METRICS,
    STATE_METRICS,
)
from deployments.metrics.ingress_metrics import HTTP_METRICS, PLANNER_METRICS, SCORER_METRICS
from deployments.metrics.metric import Metric
from deployments.metrics.prefix_cache_metrics import CACHE_METRICS
from deployments.metrics.vllm_metrics import VLLM_METRICS
from deployments.metrics.vllm_metrics import __doc__ as vllm_names

REFERENCE = Path(__file__).parent.parent / "METRICS.md"

COMMAND = "uv run python -m deployments.metrics.reference"

INTRODUCTION = f"""\
# Metrics

All metrics of a node, as `GET /metrics` of its ingress shows them in Prometheus's text format; see the section
"Metrics" of [README.md](README.md). A counter's name ends with `_total` there. Every metric has the label
`model_name`, and those of engines the label `engine`: the engine's number on its node, `0` for the only one. A metric
without a value on a node is absent.

In the column *Ray*, "yes" means that the metric is also on the node's Ray metrics port, as `ray_vllm_...` or
`ray_orchard_...`.

This file is generated from the catalog in `deployments/metrics/`. After a change there, run `{COMMAND} --write`.
"""

SECTIONS: tuple[tuple[str, Sequence[Metric]], ...] = (
    ("Names of vLLM", VLLM_METRICS),
    ("Engine", STATE_METRICS),
    ("Memory", MEMORY_METRICS),
    ("Queue", QUEUE_METRICS),
    ("Prefix cache", CACHE_METRICS),
    ("Drafts", DRAFT_METRICS),
    ("Sparse prefill in the engine", SPARSE_METRICS),
    ("HTTP", HTTP_METRICS),
    ("Planners", PLANNER_METRICS),
    ("Scorer", SCORER_METRICS),
)


def reference() -> str:
    """Return the reference as Markdown."""
    assert sum(len(metrics) for _, metrics in SECTIONS) == len(METRICS), "SECTIONS has all metrics"
    tables = [f"## {title}\n\n{_table(metrics)}" for title, metrics in SECTIONS]
    return "\n".join([INTRODUCTION, f"{tables[0]}\n{_notes_on_vllm()}\n", *tables[1:]])


def is_mirrored(metric: Metric) -> bool:
    """Tell whether a metric is also among Ray's, see RayMirror."""
    return metric.is_of_engine and (metric.kind != "histogram" or metric.of_choice is not None)


def _table(metrics: Sequence[Metric]) -> str:
    rows = [
        (
            f"`{metric.name}`",
            metric.kind,
            metric.unit,
            ", ".join(f"`{label}`" for label in metric.labels),
            "yes" if is_mirrored(metric) else "",
            metric.help,
        )
        for metric in metrics
    ]
    table = [("metric", "kind", "unit", "labels", "Ray", "meaning"), ("---",) * 6, *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in table)


def _notes_on_vllm() -> str:
    """Return what the module says about vLLM's names, without its first line."""
    return (vllm_names or "").partition("\n")[2].strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the reference, or write it to deployments/METRICS.md."""
    parser = argparse.ArgumentParser(COMMAND.removeprefix("uv run "), description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write it to {REFERENCE.name} instead of printing it")
    if parser.parse_args(argv).write:
        REFERENCE.write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())


if __name__ == "__main__":
    main()
