"""POST /v1/completions, and its cancellation."""

import time
from dataclasses import replace
from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.context import HttpContext
from deployments.http.errors import RequestNotFound
from deployments.http.openai.completions_encoder import CompletionsEcho, CompletionsEncoder
from deployments.http.openai.completions_wire import CompletionsBody
from deployments.http.openai.merged_generation import start_all
from deployments.http.parsed_request import ParsedRequest
from deployments.http.request_reader import sketched
from deployments.protocol import ChatRequest, Generation, Route

PATH = "/v1/completions"
EXAMPLE = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.7}


class Completions:
    """The endpoints /v1/completions and /v1/completions/{id}/cancel."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        app.add_route(PATH, guard(self.create), ["POST"])
        describe(PATH, "POST", CompletionsBody, "Continue one or several raw prompts.", EXAMPLE)
        app.add_route(PATH + "/{id:path}/cancel", guard(self.cancel), ["POST"])
        describe(PATH + "/{id}/cancel", "POST", None, "Cancel a completion by its id or X-Request-Id.")

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "completions", self._job)

    async def _job(self, parsed: ParsedRequest) -> Job:
        id = self._context.new_id("cmpl-")
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
        return Job(id, start, encoder, parsed.stream, echo.num_answers)

    async def _start(
        self, key: KeyIdentity, requests: list[ChatRequest], encoder: CompletionsEncoder, echo: CompletionsEcho
    ) -> Generation:
        if echo.echo:
            encoder.prompt_texts = tuple([await self._text(request) for request in requests])
        starts = [lambda request=request: self._context.start(key, request, Route.TEXT) for request in requests]
        return await start_all(starts, echo.num_choices)

    async def _text(self, request: ChatRequest) -> str:
        prompt = request.raw_prompt
        assert prompt is not None
        return prompt if isinstance(prompt, str) else await self._context.backend.text_of(prompt, request.prompt_field)

    async def cancel(self, request: Request) -> Response:
        """Cancel a completion, see ChatCompletions.cancel."""
        request_id = request.path_params["id"]
        if not await self._context.backend.cancel(request_id):
            raise RequestNotFound(request_id)
        return JSONResponse({"id": request_id, "object": "text_completion.cancel", "cancelled": True})
