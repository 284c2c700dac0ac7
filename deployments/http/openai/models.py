"""GET /v1/models: the model that is served, in the fields of both dialects."""

import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.door import Door


class Models:
    def __init__(self, door: Door):
        self._door = door
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        guard = self._door.errors.guard
        app.add_route("/v1/models", guard(self.list), ["GET"])
        app.add_route("/v1/models/{model:path}", guard(self.get), ["GET"])

    async def list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def get(self, request: Request) -> Response:
        self._door.rules.check_model(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._door.backend.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "orchard",
        }
