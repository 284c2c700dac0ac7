"""POST /tokenize and POST /detokenize in vLLM's dialect, also under /v1."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.context import HttpContext
from deployments.http.job import PlainBody, PlainJob
from deployments.http.openai.tokenization_wire import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest

EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}
DETOKENIZE_EXAMPLE = {"model": "demo", "tokens": [72, 101, 108]}


class Tokenization:
    """The endpoints /tokenize and /detokenize, also under /v1."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        bodies, count, turn = TokenizeTextBody | TokenizeChatBody, self.tokenize, self.detokenize
        found: list[Operation] = []
        for root in ("", "/v1"):
            summary = "Count and list the tokens of a prompt."
            found.append(Operation("POST", f"{root}/tokenize", count, summary, bodies, EXAMPLE))
            summary = "Turn token ids into text."
            found.append(Operation("POST", f"{root}/detokenize", turn, summary, DetokenizeBody, DETOKENIZE_EXAMPLE))
        return tuple(found)

    async def tokenize(self, request: Request) -> Response:
        return self._answer(request, "tokenize", self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return self._answer(request, "detokenize", self._text)

    def _answer(self, request: Request, kind: str, work: Callable[[ParsedRequest], Awaitable[PlainBody]]) -> Response:
        async def make_job(parsed: ParsedRequest) -> PlainJob:
            return PlainJob(lambda: work(parsed))

        return AnswerResponse(self._context, request.state.request_id, kind, "tok-", make_job)

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
