"""POST /v1/chat/completions, and its cancellation."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.cancellation import cancel_operation
from deployments.http.context import HttpContext
from deployments.http.job import Job
from deployments.http.openai.chat_encoder import ChatEncoder
from deployments.http.openai.chat_wire import ChatCompletionBody
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest

PATH = "/v1/chat/completions"
EXAMPLE = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
    "max_tokens": 64,
}


def cancelled(id: str) -> dict[str, Any]:
    """Return the body of the answer to a cancellation."""
    return {"id": id, "object": "chat.completion.cancel", "cancelled": True}


class ChatCompletions:
    """The endpoints /v1/chat/completions and /v1/chat/completions/{id}/cancel."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Cancel a completion by its id or X-Request-Id."
        return (
            Operation("POST", PATH, self.create, "Answer a conversation.", ChatCompletionBody, EXAMPLE),
            cancel_operation(self._context, PATH, summary, cancelled),
        )

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "chat", "chatcmpl-", self._job)

    async def _job(self, parsed: ParsedRequest) -> Job:
        chat = parsed.request
        encoder = ChatEncoder(parsed.echo, chat.request_id, self._context.backend.model_name, int(time.time()))
        return Job(self._context.starting(parsed), encoder, parsed.stream, chat.num_choices)
