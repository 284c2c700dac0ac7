"""Recorder: stands between a program and a server, passes on every byte and keeps both sides of each exchange."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.http.dialects import DIALECTS
from deployments.http.error_map import ErrorMap

START_TIMEOUT_S = 30.0
HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length", "keep-alive", "upgrade"}
"""Headers of one connection, which are not passed on."""


Refuse = Callable[["Exchange"], Exception | None]
"""Returns the error with which the recorder answers a request in the server's stead; None: it is passed on."""


@dataclass
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    """The JSON value; None without a body, text if it is no JSON."""
    status: int = 0
    """0: no answer has come."""
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    is_whole: bool = False
    """The program read the answer to its end."""
    has_ended: bool = False
    """It is whole, or the program has closed the connection."""
    began: float = field(default_factory=time.monotonic)

    @property
    def is_generation(self) -> bool:
        return self.method == "POST" and "count_tokens" not in self.path

    @property
    def is_stream(self) -> bool:
        return self.answer_headers.get("content-type", "").startswith("text/event-stream")

    @property
    def error_message(self) -> str:
        """The server's words in an error body, or the body."""
        try:
            return json.loads(self.answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return self.answer.decode(errors="replace")

    def events(self) -> list[Any]:
        """Return the data of a stream's events, without [DONE]."""
        lines = self.answer.decode().splitlines()
        data = [line[5:].strip() for line in lines if line.startswith("data:")]
        return [json.loads(one) for one in data if one != "[DONE]"]


class Recorder:
    """An HTTP server in a thread that forwards to `target`, a URL without a path.

    Attributes:
        exchanges: In the order of their requests.
    """

    def __init__(self, target: str, listening: socket.socket, refuse: Refuse | None = None):
        self.exchanges: list[Exchange] = []
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._target = target
        self._socket = listening
        self._refuse = refuse
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="critical",
            lifespan="off",
            ws="none",
            interface="asgi3",
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    async def _serve(self) -> None:
        async with httpx.AsyncClient(base_url=self._target, timeout=None) as self._upstream:
            await self._server.serve([self._socket])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content = await request.body()
        exchange = Exchange(request.method, request.url.path, dict(request.headers), _json(content))
        self.exchanges.append(exchange)
        refusal = self._refuse(exchange) if self._refuse is not None else None
        response = (
            await self._forward(request, content, exchange) if refusal is None else _refused(refusal, exchange, scope)
        )
        await response(scope, receive, send)

    async def _forward(self, request: Request, content: bytes, exchange: Exchange) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._upstream.build_request(request.method, url, headers=headers, content=content)
        answer = await self._upstream.send(sent, stream=True)
        exchange.status, exchange.answer_headers = answer.status_code, dict(answer.headers)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    exchange.answer += chunk
                    yield chunk
                exchange.is_whole = True
            finally:
                exchange.has_ended = True
                with anyio.CancelScope(shield=True):  # the server must see that the program has left
                    await answer.aclose()

        return StreamingResponse(passed_on(), answer.status_code, kept)


def _refused(refusal: Exception, exchange: Exchange, scope: Scope) -> Response:
    """Return the server's own words for an error."""
    response = ErrorMap(DIALECTS).response(refusal, "req_refused", scope)
    exchange.status, exchange.answer = response.status_code, bytes(response.body)
    exchange.is_whole = exchange.has_ended = True
    return response


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")
