"""GET /openapi.json and GET /docs: the API describes itself."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.http.context import HttpContext
from deployments.http.openapi_page import CONTENT_SECURITY_POLICY, docs_page
from deployments.http.operation import Operation


class Documentation:
    """Serves the document, and a page of it without external resources."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("GET", "/openapi.json", self.document, "This document."),
            Operation("GET", "/docs", self.page, "This document as a page.", media_type="text/html"),
        )

    async def document(self, request: Request) -> Response:
        return JSONResponse(self._context.api.document)

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(docs_page(self._context.api.document), headers=headers)
