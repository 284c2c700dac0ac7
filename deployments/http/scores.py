"""Scores in any dialect: their computation for a request."""

from deployments.http.context import HttpContext
from deployments.requests import ScoreRequest, Scores


async def score(context: HttpContext, wanted: ScoreRequest) -> Scores:
    """Compute the scores of a request. Raises OrchardError."""
    await context.check_ready()
    return await context.backend.score(wanted)
