"""The bodies of the status routes, as the key of a request may see them."""

from typing import Any

from starlette.requests import Request

from deployments.http.context import HttpContext
from deployments.http.redaction import administrative_view, public_view


async def status_of(context: HttpContext, request: Request) -> dict[str, Any]:
    """Return the body of `GET /v1/status`. Its last three sections are those of this node's ingress."""
    here = {
        "bodies": context.bodies.status(),
        "ignored_fields": context.ignored.status(),
        "answers": context.backend.figures.status(shows_names=request.state.is_administrative),
    }
    return viewed(request, {**await context.backend.status(), **here})


def viewed(request: Request, page: dict[str, Any]) -> dict[str, Any]:
    """Return a page in full for an administrative request, else only its figures."""
    view = administrative_view if request.state.is_administrative else public_view
    return view(page)
