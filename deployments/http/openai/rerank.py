"""POST /v1/rerank in the form of Jina, Cohere and vLLM, also as /rerank and /v2/rerank."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.answer_response import AnswerResponse
from deployments.http.context import HttpContext
from deployments.http.embeddings import completed
from deployments.http.job import PlainBody, PlainJob
from deployments.http.openai.rerank_wire import RerankBody, RerankEcho
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest
from deployments.http.scores import score
from deployments.requests import ScoreRequest, Scores

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
ID_PREFIX = "rerank-"
EXAMPLE = {"model": "demo", "query": "Where do apples grow?", "documents": ["On trees.", "In mines."], "top_n": 1}


class Rerank:
    """The endpoint /v1/rerank and its other paths."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Sort documents by their relevance for a query: by a reranker, or by the cosine of embeddings."
        return tuple(Operation("POST", path, self.create, summary, RerankBody, EXAMPLE) for path in PATHS)

    async def create(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "rerank", ID_PREFIX, self._job)

    async def _job(self, parsed: ParsedRequest) -> PlainJob:
        echo = parsed.echo
        wanted = completed(self._context, echo.wanted, parsed)
        return PlainJob(lambda: self._rerank(wanted, echo), wanted.num_parallel)

    async def _rerank(self, wanted: ScoreRequest, echo: RerankEcho) -> PlainBody:
        found = await score(self._context, wanted)
        usage = {"prompt_tokens": found.num_prompt_tokens, "total_tokens": found.num_prompt_tokens}
        head = {"id": wanted.request_id, "model": self._context.backend.model_name, "usage": usage}
        return PlainBody({**head, "results": _results(found, echo)}, found.num_prompt_tokens)


def _results(found: Scores, echo: RerankEcho) -> list[dict[str, Any]]:
    """Return the most relevant documents, among equals the first."""
    order = sorted(range(len(found.values)), key=lambda index: (-found.values[index], index))
    results = []
    for index in order[: echo.top_n]:
        document = {"document": {"text": echo.wanted.documents[index]}} if echo.returns_documents else {}
        results.append({"index": index, **document, "relevance_score": found.values[index]})
    return results
