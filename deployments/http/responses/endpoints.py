"""POST /v1/responses, and the routes of stored responses: get, delete, cancel, list input items.

Responses are stored in the memory of the node that generated them; other nodes answer 404. With several nodes, a load
balancer must therefore route requests by session, for example by `x-session-id`, which this module does not read.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.context import HttpContext
from deployments.http.errors import shown
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.request_reader import sketched
from deployments.http.responses.body import ResponsesBody
from deployments.http.responses.conversation import conversation
from deployments.http.responses.encoder import ResponsesEcho, ResponsesEncoder
from deployments.http.responses.items import Item, references, response_id_of
from deployments.http.responses.store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    StoredResponse,
    Turn,
)
from deployments.protocol import ChatRequest, Route
from engine.protocol import InvalidRequest

MAX_INLINE_BYTES = 64 * 2**10
"""Largest conversation that is joined on the event loop."""

ID_PREFIX = "resp_"

PATH = "/v1/responses"
EXAMPLE = {"model": "demo", "input": "What is 12 + 30?", "max_output_tokens": 64}

MAX_PAGE = 100
"""Most input items per page."""

DEFAULT_PAGE = 20


class Responses:
    """The endpoints under /v1/responses, with the store of responses and the responses in progress on this node."""

    def __init__(self, context: HttpContext):
        self._context = context
        config = context.config
        self._store = ResponseStore(
            config.stored_responses_max, config.stored_responses_mb * 2**20, config.stored_responses_ttl_s
        )
        self._running: dict[str, tuple[str, ResponsesEncoder]] = {}
        """Id of each response in progress on this node to its owner and encoder."""

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route(PATH, guard(self.create), ["POST"])
        describe(PATH, "POST", ResponsesBody, "Answer a conversation of items.", EXAMPLE)
        app.add_route(PATH + "/{id}", guard(self.one), ["GET", "DELETE"])  # one route for a complete Allow header
        describe(PATH + "/{id}", "GET", None, "Return a stored response.")
        describe(PATH + "/{id}", "DELETE", None, "Delete a stored response.")
        app.add_route(PATH + "/{id}/cancel", guard(self.cancel), ["POST"])
        describe(PATH + "/{id}/cancel", "POST", None, "Cancel a response.")
        app.add_route(PATH + "/{id}/input_items", guard(self.input_items), ["GET"])
        describe(PATH + "/{id}/input_items", "GET", None, "List the input items of a stored response.")

    async def create(self, request: Request) -> Response:
        owner = _owner(request)
        id = self._context.new_id(ID_PREFIX)

        async def make_job(parsed: ParsedRequest) -> Job:
            parsed, earlier = await self._joined(parsed, owner)
            chat = replace(parsed.request, request_id=id)
            encoder = self._encoder(owner, earlier, parsed.echo, id)
            return Job(id, self._context.starting(chat, parsed.route), encoder, parsed.stream)

        response = AnswerResponse(self._context, request.state.request_id, "responses", make_job)
        return EndingResponse(response, lambda: self._running.pop(id, None))

    async def one(self, request: Request) -> Response:
        id, owner = request.path_params["id"], _owner(request)
        if request.method == "DELETE":
            if not self._store.delete(owner, id):
                raise ResponseNotFound(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("`stream` is true: stored responses cannot be streamed.", "stream")
        if (stored := self._store.get(owner, id)) is not None:
            return Response(stored.turns[-1].body, media_type="application/json")
        running_owner, encoder = self._running.get(id, (None, None))
        if encoder is None or running_owner != owner or not encoder.is_stored:
            raise ResponseNotFound(id)
        return JSONResponse(encoder.response("in_progress"))

    async def cancel(self, request: Request) -> Response:
        """Cancel a running response, whose client receives an error; return a complete one unchanged."""
        id, owner = request.path_params["id"], _owner(request)
        if (stored := self._store.get(owner, id)) is not None:
            return Response(stored.turns[-1].body, media_type="application/json")
        running_owner, encoder = self._running.get(id, (owner, None))
        if running_owner != owner or not id.startswith(ID_PREFIX) or not await self._context.backend.cancel(id):
            raise ResponseNotFound(id)
        if encoder is None:  # another node generates it
            encoder = ResponsesEncoder(
                ResponsesEcho(_NO_SETTINGS), id, self._context.backend.model_name, int(time.time())
            )
        return JSONResponse(encoder.response("cancelled"))

    async def input_items(self, request: Request) -> Response:
        """List the input items of the request itself, without those of previous responses."""
        id = request.path_params["id"]
        if (stored := self._store.get(_owner(request), id)) is None:
            raise ResponseNotFound(id)
        return JSONResponse(_page(stored.input_items, request.query_params))

    def _encoder(self, owner: str, earlier: tuple[Turn, ...], echo: ResponsesEcho, id: str) -> ResponsesEncoder:
        stores = echo.stores and self._store.is_enabled
        if not stores:
            echo = replace(echo, items=b"[]", settings={**echo.settings, "store": False})

        def keep(body: dict[str, Any]) -> None:
            turn = Turn(echo.items, json.dumps(body).encode())
            self._store.add(StoredResponse(id, owner, (*earlier, turn)))

        created = int(time.time())
        encoder = ResponsesEncoder(echo, id, self._context.backend.model_name, created, keep if stores else None)
        self._running[id] = owner, encoder
        return encoder

    async def _joined(self, parsed: ParsedRequest, owner: str) -> tuple[ParsedRequest, tuple[Turn, ...]]:
        """Return the request joined with the stored conversation that it continues, and the turns of the latter."""
        echo: ResponsesEcho = parsed.echo
        if not echo.is_open:
            return parsed, ()
        earlier: tuple[Turn, ...] = ()
        if (id := echo.previous_response_id) is not None:
            if (previous := self._store.get(owner, id)) is None:
                raise PreviousResponseNotFound(id, "previous_response_id")
            earlier = previous.turns
        referenced = {stored.id: stored.turns[-1] for stored in (self._holder(id, owner) for id in echo.references)}
        num_bytes = len(echo.items) + sum(turn.num_bytes for turn in (*earlier, *referenced.values()))
        limit = self._context.config.max_body_bytes
        _check_size(num_bytes, limit)
        join = partial(_join, parsed.request, echo, earlier, referenced, self._context.rules, limit)
        is_small = num_bytes <= MAX_INLINE_BYTES and not self._context.rules.may_backtrack
        items, request, route = join() if is_small else await asyncio.to_thread(join)
        return replace(parsed, request=request, route=route, echo=replace(echo, items=items)), earlier

    def _holder(self, id: str, owner: str) -> StoredResponse:
        """Return the stored response that contains the item with this id. Raises ResponseNotFound."""
        response_id = response_id_of(id)
        stored = None if response_id is None else self._store.get(owner, response_id)
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


_NO_SETTINGS: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


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
    known = {item["id"]: item for id, turn in referenced.items() for item in turn.named_items(id)}
    sizes: dict[str, int] = {}
    num_bytes = 0
    for i, id in list(references(items)):
        if id not in known:
            raise ResponseNotFound(id, f"input[{i}]")
        items[i] = known[id]
        sizes[id] = sizes.get(id) or len(json.dumps(known[id]))
        num_bytes += sizes[id]
        _check_size(num_bytes, limit)
    before = [item for turn in earlier for item in turn.all_items]
    messages, route = conversation([*before, *items], echo.instructions, rules)
    joined = sketched(replace(request, messages=messages))
    return json.dumps(items, ensure_ascii=False).encode() if referenced else echo.items, joined, route


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
