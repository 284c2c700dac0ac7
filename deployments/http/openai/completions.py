"""POST /v1/completions, and its cancellation."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.cancellation import cancel_operation
from deployments.http.context import HttpContext
from deployments.http.generation import Generation
from deployments.http.job import Job
from deployments.http.openai.completions_encoder import CompletionsEcho, CompletionsEncoder
from deployments.http.openai.completions_wire import CompletionsBody
from deployments.http.openai.merged_generation import start_all
from deployments.http.openai.prompt_only import PromptOnly
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest
from deployments.http.sketch import sketched
from deployments.requests import ChatRequest, Route

PATH = "/v1/completions"
EXAMPLE = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.7}


def cancelled(id: str) -> dict[str, Any]:
    """Return the body of the answer to a cancellation."""
    return {"id": id, "object": "text_completion.cancel", "cancelled": True}


class Completions:
    """The endpoints /v1/completions and /v1/completions/{id}/cancel."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Cancel a completion by its id or X-Request-Id."
        return (
            Operation("POST", PATH, self.create, "Continue one or several raw prompts.", CompletionsBody, EXAMPLE),
            cancel_operation(self._context, PATH, summary, cancelled),
        )

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "completions", "cmpl-", self._job)

    async def _job(self, parsed: ParsedRequest) -> Job:
        id = parsed.request.request_id
        echo: CompletionsEcho = parsed.echo
        encoder = CompletionsEncoder(echo, id, self._context.backend.model_name, int(time.time()))
        requests = [
            sketched(
                replace(
                    parsed.request, raw_prompt=prompt, prompt_field=field, request_id=f"{id}-{index}" if index else id
                )
            )
            for index, (prompt, field) in enumerate(zip(echo.prompts, echo.fields, strict=True))
        ]
        start = partial(self._start, requests=requests, encoder=encoder, echo=echo)
        return Job(start, encoder, parsed.stream, echo.num_answers)

    async def _start(
        self, requests: list[ChatRequest], encoder: CompletionsEncoder, echo: CompletionsEcho
    ) -> Generation:
        if echo.echo:
            encoder.prompt_texts = tuple([await self._text(request) for request in requests])
        starts = [lambda request=request: self._context.start(request, Route.TEXT) for request in requests]
        generation = await start_all(starts, echo.num_choices)
        return generation if echo.has_answer else PromptOnly(generation)

    async def _text(self, request: ChatRequest) -> str:
        prompt = request.raw_prompt
        assert prompt is not None
        return prompt if isinstance(prompt, str) else await self._context.backend.text_of(prompt, request.prompt_field)
