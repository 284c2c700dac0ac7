"""TextMTP: the planner of requests that are text only."""

from ray import serve

from deployments.planners.planner import Planner
from deployments.ray_internals import by_reference


@by_reference
@serve.deployment()
class TextMTP(Planner):
    """Plans texts and embeddings, and decodes tokens."""
