"""HttpContext: the state that all endpoints share, and how they read a body and start a generation."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from starlette.requests import Request

from deployments.http.answer_id import new_answer_id
from deployments.http.api_keys import KeyIdentity
from deployments.http.backend import Backend
from deployments.http.body_encoding import decoded
from deployments.http.config import HttpConfig
from deployments.http.error_map import ErrorMap
from deployments.http.errors import NotReady, shown
from deployments.http.fields import IgnoredFields, printable
from deployments.http.generation import Generation
from deployments.http.openapi import ApiDocument
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.shared_limits import SharedLimits
from deployments.http.shared_responses import SharedResponses
from deployments.http.timeline import current
from deployments.http.unread_bodies import UnreadBodies, read_body
from deployments.placement.conversation_keys import session_of
from deployments.requests import ChatRequest, Route
from engine.errors import EngineFailed, InvalidRequest, Unavailable

IGNORED_HEADER = "X-Orchard-Ignored"
"""Response header that names what was ignored: unknown fields of the body, parts of the tools' schemas."""

RESUME_HEADER = "X-Orchard-Resume"
"""Request header, `on` or `off`: whether the answer may go on at another engine if its own is lost."""

NODE_HEADER = "X-Orchard-Node"
"""Response header with the ids of the nodes that began the answer, as in `/v1/status`."""


class Reader(Protocol):
    """Parses bodies, see BodyReader."""

    async def read(self, body: bytes, kind: str) -> ParsedRequest: ...


class HttpContext:
    """Shared by the endpoints of all dialects.

    Attributes:
        bodies: Bodies that are still arriving, with their limits.
        ignored: Counts of unknown fields.
        rules: Rules for parsing bodies.
        api: The OpenAPI document.
        greeting: See DialectTable.greeting.
        reader: Parses bodies.
        limits: Limits of the API keys.
        responses: Stored responses, and those in progress.
    """

    def __init__(
        self,
        backend: Backend,
        config: HttpConfig,
        rules: ReadingRules,
        reader: Reader,
        errors: ErrorMap,
        api: ApiDocument,
        limits: SharedLimits,
        responses: SharedResponses,
        tag: str,
        greeting: str,
    ):
        self.backend = backend
        self.limits = limits
        self.responses = responses
        self._tag = tag
        self.config = config
        self.errors = errors
        self.bodies = UnreadBodies(config.body_limits)
        self.ignored = IgnoredFields()
        self.rules = rules
        self.api = api
        self.reader = reader
        self.greeting = greeting
        self._has_been_ready = False

    def new_id(self, prefix: str) -> str:
        """Return the id of a new answer."""
        return new_answer_id(prefix, self._tag)

    async def read(self, request: Request, kind: str, id: str = "") -> ParsedRequest:
        """Read and parse the body of a request, and complete it by what its headers and its API key say.

        Args:
            request: The HTTP request.
            kind: See Dialect.bodies.
            id: The id of its answer; '' where nothing is computed.

        Raises:
            BodyTooLarge, BodyTooSlow, Overloaded, ClientDisconnect: See read_body and decoded.
            InvalidRequest, ModelNotFound, Unavailable: See BodyReader.read.
        """
        timeline = current()
        body = await read_body(request.scope, request.receive, self.bodies)
        timeline.lap("body", num_bytes=len(body))
        if encoding := request.headers.get("content-encoding", ""):
            body = await asyncio.to_thread(decoded, body, encoding, self.config.max_body_bytes)
        parsed = await self.reader.read(body, kind)
        timeline.lap("parse")
        key: KeyIdentity = request.state.key
        whole = replace(
            parsed.request,
            request_id=id,
            session=session_of(request.headers) or parsed.request.session,
            resume=_resume_of(request.headers),
        )
        return replace(parsed, request=key.apply(whole), max_rows=key.limits.max_rows)

    def ignored_header(self, parsed: ParsedRequest) -> dict[str, str]:
        """Count the unknown fields of a request and return the response header that names them, if there are any."""
        self.ignored.note(parsed.ignored)
        return {IGNORED_HEADER: ", ".join(map(printable, parsed.ignored))} if parsed.ignored else {}

    def starting(self, parsed: ParsedRequest) -> Callable[[], Awaitable[Generation]]:
        """Return a function that starts a request once, after which it no longer refers to the conversation."""
        waiting = [parsed.request]
        route = parsed.route
        return lambda: self.start(waiting.pop(), route)

    async def start(self, chat: ChatRequest, route: Route) -> Generation:
        """Start a generation. Raises OrchardError, NotReady while no engine is ready."""
        await self.check_ready()
        try:
            return await self.backend.start(chat, route)
        except Exception as error:
            converted = self.errors.convert(error)
            if isinstance(converted, EngineFailed) and (reason := await self.backend.not_ready()) is not None:
                if isinstance(converted, Unavailable):
                    raise Unavailable(f"{converted.message} {reason}", converted.retry_after_s) from error
                raise NotReady(reason) from error
            raise

    async def check_ready(self) -> None:
        """Raise NotReady while the first engine is loading, so that requests do not wait for it."""
        if self._has_been_ready:
            return
        if (reason := await self.backend.not_ready()) is not None:
            raise NotReady(reason)
        self._has_been_ready = True


def _resume_of(headers: Mapping[str, str]) -> bool | None:
    """Return what a request says in RESUME_HEADER; None without it. Raises InvalidRequest."""
    match headers.get(RESUME_HEADER):
        case None:
            return None
        case "on":
            return True
        case "off":
            return False
        case other:
            raise InvalidRequest(f"The header {RESUME_HEADER} is {shown(other)}; it must be on or off.", RESUME_HEADER)
