"""POST /api/chat and POST /api/generate, and their cancellation."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.cancellation import cancel_operation
from deployments.http.context import HttpContext
from deployments.http.job import Job, PlainBody, PlainJob
from deployments.http.ollama.chat_wire import OllamaChatBody
from deployments.http.ollama.generate_wire import OllamaGenerateBody
from deployments.http.ollama.generation_wire import GenerationEcho
from deployments.http.ollama.lines_encoder import ChatLines, GenerateLines
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest

CHAT, GENERATE = "/api/chat", "/api/generate"
CHAT_EXAMPLE = {"model": "demo", "stream": False, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
GENERATE_EXAMPLE = {"model": "demo", "stream": False, "prompt": "What is 12 + 30?", "options": {"temperature": 0}}

ID_PREFIX = "ollama-"


def cancelled(id: str) -> dict[str, Any]:
    """Return the body of the answer to a cancellation."""
    return {"id": id, "cancelled": True}


class Generations:
    """The endpoints /api/chat and /api/generate. The ids of their answers are only those of their timelines."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        answer, go_on = "Answer a conversation, in Ollama's dialect.", "Answer one prompt, in Ollama's dialect."
        summary = "Cancel an answer by its X-Request-Id."
        return (
            Operation("POST", CHAT, self.chat, answer, OllamaChatBody, CHAT_EXAMPLE),
            cancel_operation(self._context, CHAT, summary, cancelled),
            Operation("POST", GENERATE, self.generate, go_on, OllamaGenerateBody, GENERATE_EXAMPLE),
            cancel_operation(self._context, GENERATE, summary, cancelled),
        )

    async def chat(self, request: Request) -> Response:
        return self._answer(request, "ollama_chat", ChatLines)

    async def generate(self, request: Request) -> Response:
        return self._answer(request, "ollama_generate", GenerateLines)

    def _answer(self, request: Request, kind: str, encoder: Callable[[GenerationEcho], GenerateLines]) -> Response:
        async def make_job(parsed: ParsedRequest) -> Job | PlainJob:
            lines = encoder(parsed.echo)

            async def load() -> PlainBody:
                await self._context.check_ready()
                return PlainBody(lines.loaded())

            if parsed.echo.is_load:
                return PlainJob(load)
            return Job(self._context.starting(parsed), lines, parsed.stream, form=lines)

        return AnswerResponse(self._context, request.state.request_id, kind, ID_PREFIX, make_job)
