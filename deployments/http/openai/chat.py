"""POST /v1/chat/completions, and its cancellation."""

import time
from dataclasses import replace

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.context import HttpContext
from deployments.http.errors import RequestNotFound
from deployments.http.openai.chat_encoder import ChatEncoder
from deployments.http.openai.chat_wire import ChatCompletionBody
from deployments.http.parsed_request import ParsedRequest

PATH = "/v1/chat/completions"
EXAMPLE = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
    "max_tokens": 64,
}


class ChatCompletions:
    """The endpoints /v1/chat/completions and /v1/chat/completions/{id}/cancel."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route(PATH, guard(self.create), ["POST"])
        describe(PATH, "POST", ChatCompletionBody, "Answer a conversation.", EXAMPLE)
        app.add_route(PATH + "/{id:path}/cancel", guard(self.cancel), ["POST"])
        describe(PATH + "/{id}/cancel", "POST", None, "Cancel a completion by its id or X-Request-Id.")

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "chat", self._job)

    async def _job(self, parsed: ParsedRequest) -> Job:
        id = self._context.new_id("chatcmpl-")
        chat = replace(parsed.request, request_id=id)
        encoder = ChatEncoder(parsed.echo, id, self._context.backend.model_name, int(time.time()))
        return Job(id, self._context.starting(chat, parsed.route), encoder, parsed.stream, chat.num_choices)

    async def cancel(self, request: Request) -> Response:
        """Cancel all requests with a completion id or X-Request-Id and free their rows.

        Their clients receive status 499, or an error event in the stream.
        """
        request_id = request.path_params["id"]
        if not await self._context.backend.cancel(request_id):
            raise RequestNotFound(request_id)
        return JSONResponse({"id": request_id, "object": "chat.completion.cancel", "cancelled": True})
