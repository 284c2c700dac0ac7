"""The routes for operators: health, status, and the prefix cache."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.access import READY_PATHS, AdministratorOnly
from deployments.http.backend import HAND_OVER_S
from deployments.http.context import HttpContext
from deployments.http.operation import Operation
from deployments.http.status_view import status_of, viewed
from engine.errors import InvalidRequest

DEADLINE, MAX_DEADLINE_S = "deadline_s", 3600.0
"""Parameter of a drain, and its largest value."""


class Operations:
    """The endpoints /v1/status, /v1/cache, /health/live, and those that tell whether requests can be served."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        status = "Show the engines, the planners, the ingresses and the configuration."
        move = "Move all answers of a node to others, and its snapshots within `deadline_s`; an administrative request."
        undo = "Let a drained node take requests again; an administrative request."
        return (
            Operation("GET", "/v1/status", self.status, status),
            Operation("GET", "/v1/cache", self.cache, "Show the prefix caches of all engines."),
            Operation("DELETE", "/v1/cache", self.cache, "Empty the prefix caches; an administrative request."),
            Operation("POST", "/v1/nodes/{id}/drain", self.drain, move),
            Operation("DELETE", "/v1/nodes/{id}/drain", self.drain, undo),
            Operation("GET", "/health/live", self.live, "Tell whether the process answers."),
            *(Operation("GET", path, self.ready, "Tell whether requests can be served.") for path in READY_PATHS),
        )

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        reason = await self._context.backend.not_started()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def drain(self, request: Request) -> Response:
        if not request.state.is_administrative:
            raise AdministratorOnly(f"{request.method} /v1/nodes/{{id}}/drain")
        id, is_back = request.path_params["id"], request.method == "DELETE"
        answer, deadline_s = {"id": id, "object": "node.drain", "draining": not is_back}, _deadline_s(request)
        if is_back:
            await self._context.backend.undo_drain(id)
            return JSONResponse(answer)
        moved = await self._context.backend.drain_node(id, HAND_OVER_S if deadline_s is None else deadline_s)
        return JSONResponse({**answer, "snapshots": asdict(moved)})

    async def status(self, request: Request) -> Response:
        return JSONResponse(await status_of(self._context, request))

    async def cache(self, request: Request) -> Response:
        if request.method == "DELETE":
            if not request.state.is_administrative:
                raise AdministratorOnly("DELETE /v1/cache")
            return JSONResponse(await self._context.backend.clear_cache())
        return JSONResponse(viewed(request, await self._context.backend.cache_status()))


def _deadline_s(request: Request) -> float | None:
    """Return the seconds that a drained node has for its snapshots; None if the client names none.

    Raises:
        InvalidRequest: It is no such number, or the node is not being drained.
    """
    sent = dict(request.query_params)
    for name in sent:
        if name != DEADLINE or request.method == "DELETE":
            raise InvalidRequest(f"{request.method} /v1/nodes/{{id}}/drain has no parameter {name!r}", name)
    if (text := sent.get(DEADLINE)) is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE_S:
        raise InvalidRequest(f"{DEADLINE} is {text!r}; it must be a number from 0 to {MAX_DEADLINE_S:g}", DEADLINE)
    return seconds
