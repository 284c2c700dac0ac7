"""GET / and GET /page/...: the page for chatting with the model and watching the server, as static files.

Programs that ask for `/` to find out what serves there, and do not accept HTML, get the greeting of a dialect instead.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deployments.http.access import PAGE_FILES, PAGE_PATH
from deployments.http.context import HttpContext
from deployments.http.operation import Operation

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
HTML = "text/html"
"""Browsers accept it by name where they show a page; other programs accept `*/*`, or JSON."""

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Content types of the files that are served, by suffix; other files of the folder are not."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Forbids everything from other hosts, inline scripts and styles, and HTML that DOMPurify has not sanitized."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # a browser would look up the hosts of links in answers
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page."""

    content_type: str
    body: bytes
    gzipped: bytes
    """The body, compressed."""
    digest: str
    """Hex digits of the body's hash."""

    @classmethod
    def read(cls, path: Path) -> "PageFile":
        """Read and compress a file of FOLDER."""
        body = path.read_bytes()
        return cls(TYPES[path.suffix], body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32])

    def response(self, accepted: str, known: str) -> Response:
        """Return the file, or 304 without a body.

        Args:
            accepted: The header Accept-Encoding, '' without it.
            known: The header If-None-Match, '' without it.
        """
        is_gzipped = _accepts_gzip(accepted)
        etag = f'"{self.digest}-gzip"' if is_gzipped else f'"{self.digest}"'
        headers = {**_HEADERS, "ETag": etag}
        if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        headers["Content-Type"] = self.content_type
        if is_gzipped:
            return Response(self.gzipped, headers={**headers, "Content-Encoding": "gzip"})
        return Response(self.body, headers=headers)


class WebPage:
    """Serves the page without an API key: its files contain no data, and its requests to the API carry the key."""

    def __init__(self, context: HttpContext):
        self._context = context
        self._files = read_files()

    @property
    def operations(self) -> tuple[Operation, ...]:
        page, files = "Show the page: chat, and the state of the server.", PAGE_FILES + "{file:path}"
        return (
            Operation("GET", PAGE_PATH, self.index, page, media_type="text/html", text_for_programs=True),
            Operation("GET", files, self.file, "Return a file of the page.", media_type="text/javascript"),
        )

    async def index(self, request: Request) -> Response:
        greeting = self._context.greeting
        if greeting and HTML not in request.headers.get("accept", "").lower():
            return PlainTextResponse(greeting, headers={"Vary": "Accept"})
        page = _respond(request, self._files[INDEX])
        page.headers.add_vary_header("Accept")
        return page

    async def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        found = None if name == INDEX else self._files.get(name)
        if found is None:
            raise HTTPException(404, f"The route {request.method} {PAGE_FILES}{name[:256]} does not exist.")
        return _respond(request, found)


def read_files() -> dict[str, PageFile]:
    """Return the files of the page by their path in FOLDER."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in TYPES and path.is_file()]
    return {path.relative_to(FOLDER).as_posix(): PageFile.read(path) for path in paths}


def _respond(request: Request, file: PageFile) -> Response:
    return file.response(request.headers.get("accept-encoding", ""), request.headers.get("if-none-match", ""))


def _accepts_gzip(accepted: str) -> bool:
    """Tell whether the header Accept-Encoding names gzip, with a quality that is not zero."""
    for item in accepted.split(","):
        name, _, parameters = item.partition(";")
        if name.strip().lower() == "gzip":
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
