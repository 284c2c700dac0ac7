"""POST /api/embed, and POST /api/embeddings of older clients."""

import json

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.context import HttpContext
from deployments.http.embeddings import arrays, completed, embed
from deployments.http.job import PlainBody, PlainJob
from deployments.http.ollama.durations import load_durations
from deployments.http.ollama.embed_wire import EmbedEcho, OllamaEmbedBody, OllamaEmbeddingsBody
from deployments.http.ollama.generation import ID_PREFIX
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest
from deployments.http.timeline import current

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"
EXAMPLE = {"model": "demo", "input": ["A text.", "Another one."]}
OLD_EXAMPLE = {"model": "demo", "prompt": "A text."}


class Embeds:
    """The endpoints /api/embed and /api/embeddings."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        several, one = "Compute the embeddings of texts, in Ollama's dialect.", "Compute the embedding of one text."
        return (
            Operation("POST", EMBED, self.several, several, OllamaEmbedBody, EXAMPLE),
            Operation("POST", EMBEDDINGS, self.one, one, OllamaEmbeddingsBody, OLD_EXAMPLE),
        )

    async def several(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "ollama_embed", ID_PREFIX, self._job)

    async def one(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "ollama_embeddings", ID_PREFIX, self._job_of_one)

    async def _job(self, parsed: ParsedRequest) -> PlainJob:
        return self._work(parsed, is_list=True)

    async def _job_of_one(self, parsed: ParsedRequest) -> PlainJob:
        return self._work(parsed, is_list=False)

    def _work(self, parsed: ParsedRequest, is_list: bool) -> PlainJob:
        echo: EmbedEcho = parsed.echo
        wanted = completed(self._context, echo.wanted, parsed)

        async def work() -> PlainBody:
            found = await embed(self._context, wanted)
            written = [array async for array in arrays(found.vectors)]
            if not is_list:
                return PlainBody(b'{"embedding": ' + written[0] + b"}", found.num_prompt_tokens)
            figures = {**load_durations(current()), "prompt_eval_count": found.num_prompt_tokens}
            head, tail = json.dumps({"model": echo.model}).encode(), json.dumps(figures).encode()
            body = head[:-1] + b', "embeddings": [' + b", ".join(written) + b"], " + tail[1:]
            return PlainBody(body, found.num_prompt_tokens)

        return PlainJob(work, wanted.num_parallel)
