"""The wire model of a rerank request, as Jina, Cohere and vLLM have it, and its conversion to a ScoreRequest."""

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from deployments.http.fields import validate_body
from deployments.http.openai.scored_text_wire import ScoredText, ScoredTexts, ScoringBody, field_rules, text_of
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import INT32_MAX
from deployments.requests import ChatRequest, Route, ScoreRequest

_WHOLE = "Documents are scored as a whole; send shorter ones."
FIELD_RULES = field_rules(
    neutral={"rank_fields": (["text"],), "return_embeddings": (False,), "truncation": (False,)},
    refused={
        "max_tokens_per_doc": _WHOLE,
        "max_chunks_per_doc": _WHOLE,
        "max_doc_length": _WHOLE,
        "max_query_length": "Send a shorter query.",
        "top_k": "Send `top_n`.",
    },
)


class RerankBody(ScoringBody):
    """A rerank request.

    `top_n` limits the results, 0 is all; `instruction` replaces a reranker's own; `use_activation: false` asks for a
    reranker's log-odds in place of probabilities.
    """

    query: ScoredText
    documents: ScoredTexts
    top_n: int | None = Field(None, ge=0, le=INT32_MAX)
    return_documents: bool | None = None


@dataclass(frozen=True)
class RerankEcho:
    """A rerank request, and what its answer depends on."""

    wanted: ScoreRequest
    top_n: int
    """Most results; at least the number of documents if the client sets no limit."""
    returns_documents: bool


def parse_rerank(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a rerank request; see request_reader.PARSERS. The echo is a RerankEcho."""
    body, ignored = validate_body(RerankBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    documents = tuple(map(text_of, body.documents))
    wanted = ScoreRequest(
        request_id="",
        queries=(text_of(body.query),),
        documents=documents,
        query_fields=("query",),
        document_fields=tuple(f"documents[{index}]" for index in range(len(documents))),
        has_activation=body.has_activation,
        instruction=body.instruction,
        client=body.client,
        priority=body.priority or 0,
    )
    echo = RerankEcho(wanted, body.top_n or len(documents), body.return_documents is not False)
    return ParsedRequest(ChatRequest("", (), client=body.client), Route.TEXT, False, echo, ignored)
