"""POST /v1/score in vLLM's form, also as /score."""

import time

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.context import HttpContext
from deployments.http.embeddings import completed
from deployments.http.job import PlainBody, PlainJob
from deployments.http.openai.score_wire import ScoreBody
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest
from deployments.http.scores import score
from deployments.requests import ScoreRequest

PATHS = ("/v1/score", "/score")
ID_PREFIX = "score-"
EXAMPLE = {"model": "demo", "text_1": "Where do apples grow?", "text_2": ["On trees.", "In mines."]}


class Score:
    """The endpoint /v1/score and its other path."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Score pairs of texts: by a reranker, or by the cosine of embeddings."
        return tuple(Operation("POST", path, self.create, summary, ScoreBody, EXAMPLE) for path in PATHS)

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "score", ID_PREFIX, self._job)

    async def _job(self, parsed: ParsedRequest) -> PlainJob:
        wanted = completed(self._context, parsed.echo, parsed)
        return PlainJob(lambda: self._score(wanted), wanted.num_parallel)

    async def _score(self, wanted: ScoreRequest) -> PlainBody:
        found = await score(self._context, wanted)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found.values)]
        usage = {"prompt_tokens": found.num_prompt_tokens, "total_tokens": found.num_prompt_tokens}
        head = {"id": wanted.request_id, "object": "list", "created": int(time.time())}
        body = {**head, "model": self._context.backend.model_name, "data": data, "usage": usage}
        return PlainBody(body, found.num_prompt_tokens)
