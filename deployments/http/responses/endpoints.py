"""POST /v1/responses, and the routes of stored responses: get, delete, cancel, list input items.

A response is stored in the memory of the ingress that answered its request. The others ask that one, so that a client
may send each request to another node.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deployments.http.answer_response import AnswerResponse
from deployments.http.api_keys import KeyIdentity
from deployments.http.context import HttpContext
from deployments.http.errors import shown
from deployments.http.job import Job
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.response_store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    StoredResponse,
    Turn,
)
from deployments.http.responses.body import ResponsesBody
from deployments.http.responses.conversation import conversation
from deployments.http.responses.encoder import ResponsesEcho, ResponsesEncoder
from deployments.http.responses.items import Item, listed_items, references, response_id_of
from deployments.http.shared_responses import RunningResponse
from deployments.http.sketch import sketched
from deployments.requests import ChatRequest, Route
from engine.errors import InvalidRequest

MAX_INLINE_BYTES = 64 * 2**10
"""Largest conversation that is joined on the event loop."""

ID_PREFIX = "resp_"

PATH = "/v1/responses"
EXAMPLE = {"model": "demo", "input": "What is 12 + 30?", "max_output_tokens": 64}

MAX_PAGE = 100
"""Most input items per page."""

DEFAULT_PAGE = 20


class Responses:
    """The endpoints under /v1/responses."""

    def __init__(self, context: HttpContext):
        self._context = context
        self._responses = context.responses

    @property
    def operations(self) -> tuple[Operation, ...]:
        one, items = PATH + "/{id}", PATH + "/{id}/input_items"
        return (
            Operation("POST", PATH, self.create, "Answer a conversation of items.", ResponsesBody, EXAMPLE),
            Operation("GET", one, self.one, "Return a stored response."),
            Operation("DELETE", one, self.one, "Delete a stored response."),
            Operation("POST", one + "/cancel", self.cancel, "Cancel a response."),
            Operation("GET", items, self.input_items, "List the input items of a stored response."),
        )

    async def create(self, request: Request) -> Response:
        owner = _owner(request)

        async def make_job(parsed: ParsedRequest) -> Job:
            parsed, earlier = await self._joined(parsed, owner)
            encoder = self._encoder(owner, earlier, parsed.echo, parsed.request.request_id)
            return Job(self._context.starting(parsed), encoder, parsed.stream)

        response = AnswerResponse(self._context, request.state.request_id, "responses", ID_PREFIX, make_job)
        return EndingResponse(response, lambda: self._responses.end(response.id))

    async def one(self, request: Request) -> Response:
        id, owner = request.path_params["id"], _owner(request)
        if request.method == "DELETE":
            if not await self._responses.delete(owner, id):
                raise ResponseNotFound(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("`stream` is true: stored responses cannot be streamed.", "stream")
        match await self._responses.find(owner, id):
            case StoredResponse() as stored:
                return Response(stored.body, media_type="application/json")
            case RunningResponse(body, is_stored=True):
                return JSONResponse(body)
        raise ResponseNotFound(id)

    async def cancel(self, request: Request) -> Response:
        """Cancel a running response, whose client receives an error; return a complete one unchanged."""
        id, owner = request.path_params["id"], _owner(request)
        match await self._responses.find(owner, id):
            case StoredResponse() as stored:
                return Response(stored.body, media_type="application/json")
            case RunningResponse() as running if await self._context.backend.cancel(id):
                return JSONResponse(running.cancelled())
        raise ResponseNotFound(id)

    async def input_items(self, request: Request) -> Response:
        """List the input items of the request itself, without those of previous responses."""
        id = request.path_params["id"]
        if (stored := await self._responses.stored(_owner(request), id)) is None:
            raise ResponseNotFound(id)
        return JSONResponse(_page(_inputs(stored.turns[-1], id), request.query_params))

    def _encoder(self, owner: str, earlier: tuple[Turn, ...], echo: ResponsesEcho, id: str) -> ResponsesEncoder:
        if not echo.stores:
            echo = replace(echo, items=b"[]")

        def keep(body: dict[str, Any]) -> None:
            turn = Turn(echo.items, json.dumps(body).encode())
            self._responses.store.add(StoredResponse(id, owner, (*earlier, turn)))

        created = int(time.time())
        encoder = ResponsesEncoder(echo, id, self._context.backend.model_name, created, keep if echo.stores else None)
        self._responses.begin(owner, id, encoder)
        return encoder

    async def _joined(self, parsed: ParsedRequest, owner: str) -> tuple[ParsedRequest, tuple[Turn, ...]]:
        """Return the request joined with the stored conversation that it continues, and the turns of the latter."""
        echo: ResponsesEcho = parsed.echo
        if not echo.is_open:
            return parsed, ()
        earlier: tuple[Turn, ...] = ()
        if (id := echo.previous_response_id) is not None:
            if (previous := await self._responses.stored(owner, id)) is None:
                raise PreviousResponseNotFound(id, "previous_response_id")
            earlier = previous.turns
        holders = [await self._holder(id, owner) for id in echo.references]
        referenced = {stored.id: stored.turns[-1] for stored in holders}
        num_bytes = len(echo.items) + sum(turn.num_bytes for turn in (*earlier, *referenced.values()))
        limit = self._context.config.max_body_bytes
        _check_size(num_bytes, limit)
        join = partial(_join, parsed.request, echo, earlier, referenced, self._context.rules, limit)
        is_small = num_bytes <= MAX_INLINE_BYTES and not self._context.rules.may_backtrack
        items, request, route = join() if is_small else await asyncio.to_thread(join)
        return replace(parsed, request=request, route=route, echo=replace(echo, items=items)), earlier

    async def _holder(self, id: str, owner: str) -> StoredResponse:
        """Return the stored response that contains the item with this id. Raises ResponseNotFound."""
        response_id = response_id_of(id)
        stored = None if response_id is None else await self._responses.stored(owner, response_id)
        if stored is None:
            raise ResponseNotFound(id, "input")
        return stored


def _owner(request: Request) -> str:
    """Return the name of the API key, which owns the stored responses; '' on a server without keys."""
    key: KeyIdentity = request.state.key
    return key.name


class EndingResponse(Response):
    """Sends another response and then calls a function."""

    def __init__(self, response: Response, then: Callable[[], object]):
        super().__init__()
        self._response = response
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._then()


def _join(
    request: ChatRequest,
    echo: ResponsesEcho,
    earlier: tuple[Turn, ...],
    referenced: Mapping[str, Turn],
    rules: ReadingRules,
    limit: int,
) -> tuple[bytes, ChatRequest, Route]:
    """Join the new input with the stored conversation.

    Args:
        request: The new request.
        echo: Fields of the new request.
        earlier: Turns of the previous response.
        referenced: Response id to its own turn, for referenced items.
        rules: Rules for normalizing.
        limit: Most bytes of the referenced items.

    Returns:
        The new input items as JSON with references replaced, the request for the whole conversation, and its route.
    """
    items: list[Item] = json.loads(echo.items)
    known = {item["id"]: item for id, turn in referenced.items() for item in (*_inputs(turn, id), *_outputs(turn))}
    sizes: dict[str, int] = {}
    num_bytes = 0
    for i, id in list(references(items)):
        if id not in known:
            raise ResponseNotFound(id, f"input[{i}]")
        items[i] = known[id]
        sizes[id] = sizes.get(id) or len(json.dumps(known[id]))
        num_bytes += sizes[id]
        _check_size(num_bytes, limit)
    before = [item for turn in earlier for item in (*json.loads(turn.items), *_outputs(turn))]
    messages, route = conversation([*before, *items], echo.instructions, rules)
    joined = sketched(replace(request, messages=messages))
    return json.dumps(items, ensure_ascii=False).encode() if referenced else echo.items, joined, route


def _inputs(turn: Turn, response_id: str) -> list[Item]:
    """Return the input items of a turn with their ids, as clients list them."""
    return listed_items(json.loads(turn.items), response_id)


def _outputs(turn: Turn) -> list[Item]:
    return json.loads(turn.body)["output"]


def _check_size(num_bytes: int, limit: int) -> None:
    """Raise InvalidRequest for a joined conversation that exceeds the limit of a request body."""
    if num_bytes > limit:
        raise InvalidRequest(
            f"The conversation with its stored turns has {num_bytes} bytes or more; the limit is {limit} "
            "(http.max_body_bytes).",
            "previous_response_id",
        )


def _page(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the items, newest first unless `order` is asc. Raises InvalidRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"`order` is {shown(order)}: it must be asc or desc.", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest(f"`limit` is {shown(limit)}: it must be an integer from 1 to {MAX_PAGE}.", "limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"`after` is {shown(after)}: no input item of this response has this id.", "after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > len(data),
    }
