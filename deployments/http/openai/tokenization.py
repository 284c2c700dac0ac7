"""POST /tokenize and POST /detokenize in vLLM's dialect, also under /v1."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse, Job
from deployments.http.context import HttpContext
from deployments.http.openai.tokenization_wire import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from deployments.http.parsed_request import ParsedRequest
from deployments.http.plain_answer import PlainBody, plain_job
from deployments.http.request_reader import Dialect

EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}
DETOKENIZE_EXAMPLE = {"model": "demo", "tokens": [72, 101, 108]}


class Tokenization:
    """The endpoints /tokenize and /detokenize, also under /v1."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        guard, describe = self._context.errors.guard, self._context.api.describe
        for root in ("", "/v1"):
            app.add_route(f"{root}/tokenize", guard(self.tokenize), ["POST"])
            bodies = TokenizeTextBody | TokenizeChatBody
            describe(f"{root}/tokenize", "POST", bodies, "Count and list the tokens of a prompt.", EXAMPLE)
            app.add_route(f"{root}/detokenize", guard(self.detokenize), ["POST"])
            summary = "Turn token ids into text."
            describe(f"{root}/detokenize", "POST", DetokenizeBody, summary, DETOKENIZE_EXAMPLE)

    async def tokenize(self, request: Request) -> Response:
        return self._answer(request, "tokenize", self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return self._answer(request, "detokenize", self._text)

    def _answer(
        self, request: Request, dialect: Dialect, work: Callable[[ParsedRequest], Awaitable[PlainBody]]
    ) -> Response:
        async def make_job(parsed: ParsedRequest) -> Job:
            return plain_job(self._context.new_id("tok-"), lambda key: work(parsed))

        return AnswerResponse(self._context, request.state.request_id, dialect, make_job)

    async def _tokens(self, parsed: ParsedRequest) -> PlainBody:
        backend = self._context.backend
        ids = await backend.token_ids(parsed.request, parsed.route)
        texts = await backend.token_texts(ids) if parsed.echo.returns_texts else None
        limit = backend.max_context_tokens
        return PlainBody({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def _text(self, parsed: ParsedRequest) -> PlainBody:
        tokens = parsed.request.raw_prompt
        assert isinstance(tokens, tuple)
        return PlainBody({"prompt": await self._context.backend.text_of(tokens, parsed.request.prompt_field)})
