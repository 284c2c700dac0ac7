"""POST /v1/messages, its token count, and its cancellation."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.anthropic.messages_encoder import MessagesEncoder
from deployments.http.anthropic.messages_wire import MessagesBody
from deployments.http.anthropic.phrases import wrong
from deployments.http.cancellation import cancel_operation
from deployments.http.context import HttpContext
from deployments.http.errors import shown
from deployments.http.job import Job, PlainBody, PlainJob
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest

VERSIONS = ("2023-06-01", "2026-10-21")
"""Accepted values of the header `anthropic-version`, which are treated alike."""

PATH = "/v1/messages"
EXAMPLE = {"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}


def cancelled(id: str) -> dict[str, Any]:
    """Return the body of the answer to a cancellation."""
    return {"id": id, "type": "message_cancel", "cancelled": True}


class Messages:
    """Endpoints of the Messages API. The header `anthropic-beta` is ignored: the body alone determines the request."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        answer, count = "Answer a conversation, in Anthropic's dialect.", "Count the tokens of the prompt of messages."
        return (
            Operation("POST", PATH, self.create, answer, MessagesBody, EXAMPLE),
            Operation("POST", PATH + "/count_tokens", self.count_tokens, count, MessagesBody, EXAMPLE),
            cancel_operation(self._context, PATH, "Cancel a message by its id or X-Request-Id.", cancelled),
        )

    async def create(self, request: Request) -> Response:
        _check_version(request)

        request_id: str = request.state.request_id

        async def make_job(parsed: ParsedRequest) -> Job:
            id, model = parsed.request.request_id, self._context.backend.model_name
            encoder = MessagesEncoder(parsed.echo, id, model, request_id)
            return Job(self._context.starting(parsed), encoder, parsed.stream)

        return AnswerResponse(self._context, request_id, "messages", "msg_", make_job)

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of the messages, tools and system prompt included."""
        _check_version(request)

        async def make_job(parsed: ParsedRequest) -> PlainJob:
            return PlainJob(lambda: self._count(parsed))

        return AnswerResponse(self._context, request.state.request_id, "count_tokens", "tok-", make_job)

    async def _count(self, parsed: ParsedRequest) -> PlainBody:
        await self._context.check_ready()
        return PlainBody({"input_tokens": await self._context.backend.count_tokens(parsed.request, parsed.route)})


def _check_version(request: Request) -> None:
    """Raise InvalidRequest for an unknown anthropic-version."""
    version = request.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise wrong("anthropic-version", f"{shown(version)} is not supported; send {known}, or omit the header")
