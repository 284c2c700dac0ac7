"""GET /v1/models: the served model under all its names, in the fields of OpenAI's and Anthropic's dialects."""

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.context import HttpContext
from deployments.http.operation import Operation

PATH = "/v1/models"


class Models:
    """The endpoints /v1/models and /v1/models/{model}."""

    def __init__(self, context: HttpContext):
        self._context = context
        self._created = int(time.time())

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("GET", PATH, self.list, "List the names by which requests can ask for the model."),
            Operation("GET", PATH + "/{model:path}", self.get, "Describe the model by one of its names."),
        )

    async def list(self, request: Request) -> Response:
        served = self._context.backend.model_name
        names = [served, *sorted(self._context.rules.aliases - {served})]
        cards = [self._card(name) for name in names]
        return JSONResponse(
            {"object": "list", "data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        )

    async def get(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._context.rules.check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        """Return the entry of one name; `root` is always the model's own name."""
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "orchard",
            "root": self._context.backend.model_name,
            "parent": None,
            "max_model_len": self._context.backend.max_context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": created_at,
        }
