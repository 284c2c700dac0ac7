"""POST /v1/messages, its token count, and its cancellation."""

from dataclasses import replace

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.anthropic.messages_encoder import MessagesEncoder
from deployments.http.anthropic.messages_wire import MessagesBody
from deployments.http.anthropic.phrases import wrong
from deployments.http.client_address import address_group, client_host
from deployments.http.context import HttpContext
from deployments.http.errors import RequestNotFound, shown
from deployments.http.parsed_request import ParsedRequest

VERSIONS = ("2023-06-01", "2026-10-21")
"""Accepted values of the header `anthropic-version`, which are treated alike."""

PATH = "/v1/messages"
EXAMPLE = {"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}


class Messages:
    """Endpoints of the Messages API. The header `anthropic-beta` is ignored: the body alone determines the request."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route(PATH, guard(self.create), ["POST"])
        describe(PATH, "POST", MessagesBody, "Answer a conversation, in Anthropic's dialect.", EXAMPLE)
        app.add_route(PATH + "/count_tokens", guard(self.count_tokens), ["POST"])
        describe(PATH + "/count_tokens", "POST", MessagesBody, "Count the tokens of the prompt of messages.", EXAMPLE)
        app.add_route(PATH + "/{id:path}/cancel", guard(self.cancel), ["POST"])
        describe(PATH + "/{id}/cancel", "POST", None, "Cancel a message by its id or X-Request-Id.")

    async def create(self, request: Request) -> Response:
        _check_version(request)

        request_id: str = request.state.request_id

        async def make_job(parsed: ParsedRequest) -> Job:
            id = self._context.new_id("msg_")
            chat = replace(parsed.request, request_id=id)
            encoder = MessagesEncoder(parsed.echo, id, self._context.backend.model_name, request_id)
            return Job(id, self._context.starting(chat, parsed.route), encoder, parsed.stream)

        return AnswerResponse(self._context, request_id, "messages", make_job)

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of the messages, tools and system prompt included."""
        _check_version(request)
        address = address_group(client_host(request.scope))
        with self._context.backend.in_flight.enter(request.state.request_id, address):
            parsed = await self._context.read(request, "count_tokens")
            await self._context.check_ready()
            num_tokens = await self._context.backend.count_tokens(parsed.request, parsed.route)
        return JSONResponse({"input_tokens": num_tokens}, headers=self._context.ignored_header(parsed))

    async def cancel(self, request: Request) -> Response:
        """Cancel all requests with a message id or X-Request-Id and free their rows.

        Their clients receive status 499, or an error event in the stream.
        """
        request_id = request.path_params["id"]
        if not await self._context.backend.cancel(request_id):
            raise RequestNotFound(request_id)
        return JSONResponse({"id": request_id, "type": "message_cancel", "cancelled": True})


def _check_version(request: Request) -> None:
    """Raise InvalidRequest for an unknown anthropic-version."""
    version = request.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise wrong("anthropic-version", f"{shown(version)} is not supported; send {known}, or omit the header")
