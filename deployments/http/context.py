"""HttpContext: the state that all endpoints share, and the common path of a request that generates."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer import AnswerEncoder
from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.body_reader import BodyReader
from deployments.http.config import HttpConfig
from deployments.http.errors import ErrorMap, NotReady
from deployments.http.fields import IgnoredFields, printable
from deployments.http.openapi import ApiDocument
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.rate_limits import RateLimits
from deployments.http.request_reader import Dialect
from deployments.http.unread_bodies import UnreadBodies
from deployments.protocol import Backend, ChatRequest, Generation, Route
from engine.protocol import EngineFailed, Unavailable

IGNORED_HEADER = "X-Orchard-Ignored"
"""Response header that names the unknown fields of the body, which were ignored."""

MakeEncoder = Callable[[ParsedRequest, str], AnswerEncoder]
"""Creates the encoder for a request and the id of its answer."""


class HttpContext:
    """Shared by the endpoints of all dialects.

    Attributes:
        bodies: Bodies that are still arriving, with their limits.
        ignored: Counts of unknown fields.
        limits: Rate limits of the API keys.
        rules: Rules for parsing bodies.
        api: The OpenAPI document.
        reader: Parses bodies.
    """

    def __init__(
        self,
        backend: Backend,
        config: HttpConfig,
        media_kinds: frozenset[str],
        keeps_late_system: bool,
        errors: ErrorMap,
    ):
        self.backend = backend
        self.config = config
        self.errors = errors
        self.bodies = UnreadBodies(config.body_limits)
        self.ignored = IgnoredFields()
        self.limits = RateLimits()
        self.rules = ReadingRules(
            backend.model_name,
            media_kinds,
            keeps_late_system,
            config.system_policy,
            config.volatile_patterns,
            frozenset(config.served_model_names),
            config.unknown_fields,
        )
        self.api = ApiDocument(config.unknown_fields == "refuse", backend.model_name)
        self.reader = BodyReader(self.rules, config.max_body_bytes)
        self._has_been_ready = False

    def answer(self, request: Request, dialect: Dialect, id_prefix: str, make_encoder: MakeEncoder) -> Response:
        """Return the response to a request in `dialect`; the body is read when the response is sent.

        Args:
            request: The request.
            dialect: Selects the parser.
            id_prefix: Prefix of the answer's id.
            make_encoder: Creates the encoder of the answer.
        """

        async def understand(body: bytes) -> Job:
            parsed = await self.reader.read(body, dialect)
            return self.job(parsed, f"{id_prefix}{secrets.token_hex(16)}", make_encoder)

        return self.respond(request, understand)

    def job(self, parsed: ParsedRequest, id: str, make_encoder: MakeEncoder) -> Job:
        """Create the job of a parsed request; `id` becomes the id of its answer and of its engine request."""
        encoder = make_encoder(parsed, id)
        waiting = [(replace(parsed.request, request_id=id), parsed.route)]
        return Job(
            id,
            lambda key: self.start(key, *waiting.pop()),  # drops the reference to the conversation
            encoder,
            parsed.stream,
            parsed.request.num_choices,
            self.headers(parsed),
        )

    def headers(self, parsed: ParsedRequest) -> dict[str, str]:
        """Count the unknown fields of a request and return the response header that names them."""
        if not parsed.ignored:
            return {}
        self.ignored.note(parsed.ignored)
        return {IGNORED_HEADER: ", ".join(map(printable, parsed.ignored))}

    def respond(self, request: Request, parse_body: Callable[[bytes], Awaitable[Job]]) -> Response:
        """Return the response to a request whose body `parse_body` turns into a Job."""
        return AnswerResponse(
            parse_body,
            self.backend.in_flight,
            self.bodies,
            self.limits,
            self.errors,
            request.state.request_id,
            self.config.stream_comment_s,
        )

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
