"""NodeFigures: all that the metrics of one node are read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.http.figures import HttpFigures
from engine.core.spec_prefill.plan import ScorerStatus
from engine.figures import EngineFigures


@dataclass(frozen=True, kw_only=True)
class SparsePlans:
    """Counts of a planner's decisions about sparse prefill since its start."""

    num_sparse: int = 0
    """Prompts with a sparse plan."""
    num_replanned: int = 0
    """Prompts that were scored a second time because the cached prefix had changed."""
    dense: Mapping[str, int] = field(default_factory=dict)
    """Prompts that are prefilled densely although a sparse prefill was wanted, by kind of the reason."""


@dataclass(frozen=True, kw_only=True)
class IngressFigures:
    """An ingress: its counters, and what is in progress now."""

    http: HttpFigures = field(default_factory=HttpFigures)
    num_in_flight: int = 0
    """Choices of requests whose bodies are parsed."""
    is_draining: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """The figures of the replicas on one node with at most one engine. A replica that did not answer is left out."""

    model: str
    """Name under which the model is served."""
    engine: EngineFigures | None = None
    """One engine of this node; None without one, or while it does not answer."""
    engine_number: str = "0"
    """Number of this engine on its node."""
    sparse_plans: Mapping[str, SparsePlans] = field(default_factory=dict)
    """By planner: `text`, `media`. Empty without sparse prefill."""
    scorer: ScorerStatus | None = None
    """None without a scorer on this node."""
    ingress: IngressFigures | None = None
    """None in the process of an engine."""
