"""The routes for operators: health, status, and the prefix cache."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.access import READY_PATHS, AdministratorOnly
from deployments.http.context import HttpContext
from deployments.http.status_view import status_of, viewed


class Operations:
    """The endpoints /v1/status, /v1/cache, /health/live, and those that tell whether requests can be served."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route("/v1/status", guard(self.status), ["GET"])
        describe("/v1/status", "GET", None, "Show the engines, the planners, the ingresses and the configuration.")
        app.add_route("/v1/cache", guard(self.cache), ["GET", "DELETE"])  # one route, for a whole Allow header
        describe("/v1/cache", "GET", None, "Show the prefix caches of all engines.")
        describe("/v1/cache", "DELETE", None, "Empty the prefix caches; an administrative request.")
        app.add_route("/v1/nodes/{id}/drain", guard(self.drain), ["POST", "DELETE"])
        describe(
            "/v1/nodes/{id}/drain", "POST", None, "Move all answers of a node to others; an administrative request."
        )
        describe(
            "/v1/nodes/{id}/drain", "DELETE", None, "Let a drained node take requests again; an administrative request."
        )
        app.add_route("/health/live", guard(self.live), ["GET"])
        describe("/health/live", "GET", None, "Tell whether the process answers.")
        for path in READY_PATHS:
            app.add_route(path, guard(self.ready), ["GET"])
            describe(path, "GET", None, "Tell whether requests can be served.")

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
        await self._context.backend.drain_node(id, is_back)
        return JSONResponse({"id": id, "object": "node.drain", "draining": not is_back})

    async def status(self, request: Request) -> Response:
        return JSONResponse(await status_of(self._context, request))

    async def cache(self, request: Request) -> Response:
        if request.method == "DELETE":
            if not request.state.is_administrative:
                raise AdministratorOnly("DELETE /v1/cache")
            return JSONResponse(await self._context.backend.clear_cache())
        return JSONResponse(viewed(request, await self._context.backend.cache_status()))
