"""NodeFigures: all that the metrics of one node are read from."""

from dataclasses import dataclass, field
from typing import Any

from engine.figures import EngineFigures


@dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """The figures of the replicas on one node. A replica that did not answer is left out."""

    model: str
    """Name under which the model is served."""
    engine: EngineFigures | None = None
    """None without an engine on this node, or while it does not answer."""
    ingress: dict[str, Any] = field(default_factory=dict)
