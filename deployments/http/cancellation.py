"""The cancel route behind each route that generates: it ends requests by the id of the answer or X-Request-Id."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.context import HttpContext
from deployments.http.errors import RequestNotFound
from deployments.http.operation import Operation


def cancel_operation(context: HttpContext, path: str, summary: str, body: Callable[[str], dict[str, Any]]) -> Operation:
    """Return the operation that cancels all requests with an id and frees their rows.

    Their clients receive status 499, or an error in the stream.

    Args:
        context: Shared state of the endpoints.
        path: The route that generates.
        summary: For the OpenAPI document.
        body: Returns the body of the answer, for the id.
    """

    async def cancel(request: Request) -> Response:
        request_id = request.path_params["id"]
        if not await context.backend.cancel(request_id):
            raise RequestNotFound(request_id)
        return JSONResponse(body(request_id))

    return Operation("POST", path + "/{id:path}/cancel", cancel, summary)
