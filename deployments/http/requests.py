"""GET /v1/requests and /v1/requests/{id}: where the seconds of finished requests went."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.access import AdministratorOnly
from deployments.http.context import HttpContext
from deployments.http.errors import RequestNotFound
from deployments.http.operation import Operation
from deployments.http.timeline import RequestTimeline
from deployments.http.timing import page, summary
from engine.errors import InvalidRequest

PATH = "/v1/requests"
MAX_LISTED = 100
USUALLY_LISTED = 20


class Requests:
    """The endpoints of timelines. An administrative key sees all requests, another key its own."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        several = "List finished requests of this node: the newest, or with `slowest` the slowest."
        one = "Show where the seconds of a request went, by its id or X-Request-Id."
        return Operation("GET", PATH, self.list, several), Operation("GET", PATH + "/{id:path}", self.one, one)

    async def list(self, request: Request) -> Response:
        self._check(request)
        timelines = self._context.backend.timelines
        sent = dict(request.query_params)
        choose = timelines.slowest if "slowest" in sent else timelines.newest
        num = _number(sent)
        found = [one for one in choose(timelines.max_kept) if self._may_see(request, one)]
        return JSONResponse({"object": "list", "data": [summary(one) for one in found[:num]]})

    async def one(self, request: Request) -> Response:
        self._check(request)
        id = request.path_params["id"]
        found = await self._context.backend.timeline(id)
        if found is None or not self._may_see(request, found):
            raise RequestNotFound(id)
        return JSONResponse(page(found))

    def _check(self, request: Request) -> None:
        if not request.state.is_administrative and not request.state.key.name:
            raise AdministratorOnly(f"GET {PATH}")

    def _may_see(self, request: Request, timeline: RequestTimeline) -> bool:
        return request.state.is_administrative or timeline.key_name == request.state.key.name


def _number(sent: dict[str, str]) -> int:
    """Return how many requests to list. Raises InvalidRequest."""
    for name in sent:
        if name not in ("slowest", "newest"):
            raise InvalidRequest(f"The query parameter {name!r} is unknown; it may be `slowest` or `newest`.", name)
    if len(sent) > 1:
        raise InvalidRequest("Only one of `slowest` and `newest` may be sent.", "slowest")
    for name, value in sent.items():
        if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MAX_LISTED):
            raise InvalidRequest(f"`{name}` is {value[:20]!r}; it must be between 1 and {MAX_LISTED}.", name)
        return int(value)
    return USUALLY_LISTED
