"""Door: what every endpoint needs of the server, and the one way of a request that generates."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from deployments.chat import Backend, ChatRequest, Generation, Route
from deployments.http.answer import AnswerEncoder
from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.body_reader import BodyReader
from deployments.http.config import HttpConfig
from deployments.http.errors import ErrorMap, NotReady
from deployments.http.fields import IgnoredFields, printable
from deployments.http.openapi import ApiDocument
from deployments.http.rate_limits import RateLimits
from deployments.http.request_reader import Dialect, ParsedRequest, ReadingRules
from deployments.http.unread_bodies import UnreadBodies
from engine.protocol import EngineFailed, Unavailable

IGNORED_HEADER = "X-Orchard-Ignored"
"""Names the fields of a body that are unknown here and were ignored."""

MakeEncoder = Callable[[ParsedRequest, str], AnswerEncoder]
"""Makes the encoder of a request and the id of its answer."""


class Door:
    """The endpoints of all dialects share one.

    bodies: those that are arriving. ignored: the unknown fields so far. limits: of the API keys.
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
        """The response to a request whose body is in `dialect`: read, begun and relayed as it is sent."""

        async def understand(body: bytes) -> Job:
            parsed = await self.reader.read(body, dialect)
            return self.job(parsed, f"{id_prefix}{secrets.token_hex(16)}", make_encoder)

        return self.respond(request, understand)

    def job(self, parsed: ParsedRequest, id: str, make_encoder: MakeEncoder) -> Job:
        encoder = make_encoder(parsed, id)
        waiting = [(replace(parsed.request, request_id=id), parsed.route)]
        return Job(
            id,
            lambda key: self.start(key, *waiting.pop()),  # the answer need not keep its conversation
            encoder,
            parsed.stream,
            parsed.request.num_choices,
            self.headers(parsed),
        )

    def headers(self, parsed: ParsedRequest) -> dict[str, str]:
        """The headers of the response to a request: they name its unknown fields, which are counted here."""
        if not parsed.ignored:
            return {}
        self.ignored.note(parsed.ignored)
        return {IGNORED_HEADER: ", ".join(map(printable, parsed.ignored))}

    def respond(self, request: Request, understand: Callable[[bytes], Awaitable[Job]]) -> Response:
        """The response to a request for which a dialect makes the job in its own way."""
        return AnswerResponse(
            understand,
            self.backend.in_flight,
            self.bodies,
            self.limits,
            self.errors,
            request.state.request_id,
            self.config.stream_comment_s,
        )

    async def start(self, key: KeyIdentity, chat: ChatRequest, route: Route) -> Generation:
        """Begin what the holder of a key asks for. Raises OrchardError: NotReady while no engine is."""
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
        """Raises NotReady: requests do not wait while the first engine is loaded."""
        if self._has_been_ready:
            return
        if (reason := await self.backend.not_ready()) is not None:
            raise NotReady(reason)
        self._has_been_ready = True
