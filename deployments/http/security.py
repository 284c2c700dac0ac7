"""What a request may weigh before anybody looks at its meaning: bytes, seconds, JSON depth, values; and its id."""

import asyncio
import json
import math
import re
import secrets
from typing import Any, NoReturn

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.errors import BodyTooLarge, BodyTooSlow, ErrorMap
from engine.protocol import InvalidRequest

MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 500_000
"""Without it, 64 MiB of `[],[],…` would become more than a gigabyte of Python objects."""

BODY_TIMEOUT_S = 60.0
"""For all of the body: until it is there its request takes up room. 64 MiB come in it at 9 Mbit/s."""

_SANE_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_JSON_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class RequestId:
    """Middleware: `request.state.request_id` is the client's X-Request-Id if it is sane, else a new one; echoed."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE_REQUEST_ID.fullmatch(asked) else f"req_{secrets.token_hex(16)}"
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Middleware: refuses a body by its Content-Length, and stops one without it as soon as it passes the limit.

    Then `receive` raises BodyTooLarge inside the app.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, errors: ErrorMap):
        self._app = app
        self._max_bytes = max_bytes
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._max_bytes:
            error = BodyTooLarge(int(announced), self._max_bytes)
            return await self._errors.response(error, scope["state"]["request_id"])(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise BodyTooLarge(num_bytes, self._max_bytes)
            return message

        await self._app(scope, counted, send)


async def read_body(request: Request) -> bytes:
    """Raises BodyTooLarge, BodyTooSlow, and ClientDisconnect."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise BodyTooSlow(BODY_TIMEOUT_S) from None


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, finite numbers, no lone surrogates, bounded depth and size. Raises InvalidRequest."""
    _check_shape(body)
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not UTF-8: byte {error.start} begins no character.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The request body is not valid JSON: {error.msg} at {where}.") from None
    except ValueError:
        raise InvalidRequest("The request body holds an integer with more than 4300 digits.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _check_shape(body: bytes) -> None:
    """Before parsing, since the parser recurses and allocates. Strings count as one mark, whatever is in them."""
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= MAX_JSON_DEPTH and num_opened + body.count(b",") <= MAX_JSON_VALUES:
        return
    depth = num_values = 0
    for mark in _JSON_MARKS.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            num_values += 1
        elif first in b"]}":
            depth -= 1
        elif first in b",":
            num_values += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequest(f"The request body nests deeper than {MAX_JSON_DEPTH} levels.")
        if num_values > MAX_JSON_VALUES:
            raise InvalidRequest(f"The request body holds more than {MAX_JSON_VALUES} values.")


def _refuse_number(name: str) -> NoReturn:
    raise InvalidRequest(f"The request body holds {name}: numbers must be finite.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidRequest(f"The request body holds {digits[:32]}, which is beyond the range of a 64-bit float.")
    return number


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    pending: list[tuple[str, Any]] = [("", body)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            where = f"`{path}`" if path else "The name of a field"
            raise InvalidRequest(f"{where} holds half of a surrogate pair, which is no character.", path or None)
        if isinstance(value, dict):
            for key, inner in value.items():
                pending += [(path, key), (f"{path}.{key}" if path else key, inner)]
        elif isinstance(value, list):
            pending += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
