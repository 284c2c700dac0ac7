"""GET /openapi.json and GET /docs: the API describes itself."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.http.context import HttpContext
from deployments.http.openapi_page import CONTENT_SECURITY_POLICY, docs_page


class Documentation:
    """Serves the document, and a page of it without external resources."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route("/openapi.json", guard(self.document), ["GET"])
        describe("/openapi.json", "GET", None, "This document.")
        app.add_route("/docs", guard(self.page), ["GET"])
        describe("/docs", "GET", None, "This document as a page.", media_type="text/html")

    async def document(self, request: Request) -> Response:
        return JSONResponse(self._context.api.document)

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(docs_page(self._context.api.document), headers=headers)
