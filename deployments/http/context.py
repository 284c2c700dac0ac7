"""HttpContext: the state that all endpoints share, and how they read a body and start a generation."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from starlette.requests import Request

from deployments.http.answer_id import new_answer_id
from deployments.http.api_keys import KeyIdentity
from deployments.http.body_encoding import decoded
from deployments.http.body_reader import BodyReader
from deployments.http.config import HttpConfig
from deployments.http.errors import ErrorMap, NotReady, shown
from deployments.http.fields import IgnoredFields, printable
from deployments.http.openapi import ApiDocument
from deployments.http.parsed_request import ModelDefaults, ParsedRequest, ReadingRules
from deployments.http.request_reader import Dialect
from deployments.http.shared_limits import SharedLimits
from deployments.http.unread_bodies import UnreadBodies, read_body
from deployments.placement.conversation_keys import session_of
from deployments.protocol import Backend, ChatRequest, Generation, Route
from deployments.timeline import current
from engine.protocol import EngineFailed, InvalidRequest, Unavailable

IGNORED_HEADER = "X-Orchard-Ignored"
"""Response header that names what was ignored: unknown fields of the body, parts of the tools' schemas."""

RESUME_HEADER = "X-Orchard-Resume"
"""Request header, `on` or `off`: whether the answer may go on at another engine if its own is lost."""

NODE_HEADER = "X-Orchard-Node"
"""Response header with the ids of the nodes that began the answer, as in `/v1/status`."""


class HttpContext:
    """Shared by the endpoints of all dialects.

    Attributes:
        bodies: Bodies that are still arriving, with their limits.
        ignored: Counts of unknown fields.
        rules: Rules for parsing bodies.
        api: The OpenAPI document.
        reader: Parses bodies.
        limits: Limits of the API keys.
    """

    def __init__(
        self,
        backend: Backend,
        config: HttpConfig,
        media_kinds: frozenset[str],
        keeps_late_system: bool,
        errors: ErrorMap,
        model: ModelDefaults,
        limits: SharedLimits,
        tag: str,
    ):
        self.backend = backend
        self.limits = limits
        self._tag = tag
        self.config = config
        self.errors = errors
        self.bodies = UnreadBodies(config.body_limits)
        self.ignored = IgnoredFields()
        self.rules = ReadingRules(
            backend.model_name,
            media_kinds,
            keeps_late_system,
            config.system_policy,
            config.volatile_patterns,
            frozenset(config.served_model_names),
            config.unknown_fields,
            model,
        )
        self.api = ApiDocument(config.unknown_fields == "refuse", backend.model_name)
        self.reader = BodyReader(self.rules, config.max_body_bytes)
        self._has_been_ready = False

    def new_id(self, prefix: str) -> str:
        """Return the id of a new answer."""
        return new_answer_id(prefix, self._tag)

    async def read(self, request: Request, dialect: Dialect) -> ParsedRequest:
        """Read and parse the body of a request.

        Raises:
            BodyTooLarge, BodyTooSlow, Overloaded, ClientDisconnect: See read_body and decoded.
            InvalidRequest, ModelNotFound, Unavailable: See BodyReader.read.
        """
        timeline = current()
        body = await read_body(request.scope, request.receive, self.bodies)
        timeline.lap("body", num_bytes=len(body))
        if encoding := request.headers.get("content-encoding", ""):
            body = await asyncio.to_thread(decoded, body, encoding, self.config.max_body_bytes)
        parsed = await self.reader.read(body, dialect)
        timeline.lap("parse")
        if not isinstance(parsed.request, ChatRequest):
            return parsed
        session, resume = session_of(request.headers) or parsed.request.session, _resume_of(request.headers)
        return replace(parsed, request=replace(parsed.request, session=session, resume=resume))

    def ignored_header(self, parsed: ParsedRequest) -> dict[str, str]:
        """Count the unknown fields of a request and return the response header that names them, if there are any."""
        self.ignored.note(parsed.ignored)
        return {IGNORED_HEADER: ", ".join(map(printable, parsed.ignored))} if parsed.ignored else {}

    def starting(self, request: ChatRequest, route: Route) -> Callable[[KeyIdentity], Awaitable[Generation]]:
        """Return a function that starts the request once, after which it no longer refers to the conversation."""
        waiting = [request]
        return lambda key: self.start(key, waiting.pop(), route)

    async def start(self, key: KeyIdentity, chat: ChatRequest, route: Route) -> Generation:
        """Start a generation for an API key. Raises OrchardError, NotReady while no engine is ready."""
        await self.check_ready()
        try:
            return await self.backend.start(key.apply(chat), route)
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
