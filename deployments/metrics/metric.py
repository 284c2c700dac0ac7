"""Metric: one figure with its name, unit and meaning, and how it is read from the figures of a node."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from deployments.metrics.node_figures import NodeFigures
from engine.histogram import Histogram
from engine.timeline import RowTimeline

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "bytes", "ratio", "seconds", "tokens"]

Sample = tuple[tuple[str, ...], float | Histogram]
"""The values of the labels, and the value; a Histogram of a metric of that kind."""


@dataclass(frozen=True)
class Metric:
    """One figure.

    A counter's name ends without `_total`, which the text format adds. All metrics also have the labels of
    `common_labels`.
    """

    name: str
    """With its prefix: `vllm:` for a name of vLLM with the same meaning, `orchard:` for others."""
    kind: Kind
    unit: Unit
    help: str
    """Its meaning, in one sentence."""
    read: Callable[[NodeFigures], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    """Their values are bounded: never a prompt, an id or an address."""
    is_of_engine: bool = True
    """Whether each engine of a node has one."""
    is_of_machine: bool = False
    """Whether the engines of a node have the same value, so that only its first engine shows it."""
    of_choice: Callable[[RowTimeline], float | None] | None = None
    """The value that a choice which has ended adds to a histogram, None for no value; None if its timeline does not
    tell."""

    @property
    def common_labels(self) -> tuple[str, ...]:
        """Labels before `labels`: those of engines also have, as vLLM's, the number of the engine on its node."""
        return ("model_name", "engine") if self.is_of_engine else ("model_name",)
