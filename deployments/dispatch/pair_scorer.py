"""Scores pairs of a query and a document: by the cosine of their embeddings, or by a reranker."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.dispatch.text_group import ComputeGroup, each
from deployments.requests import ChatRequest, ScoreRequest, Scores
from engine.errors import InvalidRequest
from engine.processing.cross_encoder import CrossEncoder
from engine.processing.pooling import EmbeddingModel
from engine.processing.reranker import Reranker

QUERY, DOCUMENT = "query", "document"
"""Names of an embedding model's prompts for the two parts of a search."""

Role = str | None
"""Name of the prompt in front of a text; None: the checkpoint's default."""


@dataclass(frozen=True)
class PairScorer:
    """How a checkpoint scores. A model of text alone has neither.

    Attributes:
        model_name: The name of the model, for errors.
        embedding_model: The checkpoint, if it gives embeddings.
        reranker: The checkpoint, if it is a reranker.
    """

    model_name: str
    embedding_model: EmbeddingModel | None
    reranker: Reranker | CrossEncoder | None

    async def score(self, request: ScoreRequest, compute: ComputeGroup, num_engines: int = 1) -> Scores:
        """Compute the scores of a request.

        Args:
            request: The pairs.
            compute: Computes a group of embeddings, or of scores of requests with `scored_query`.
            num_engines: Engines among which groups may be divided.

        Raises:
            OrchardError: The model scores nothing, or the first error of `compute`; the other groups are cancelled.
        """
        if isinstance(self.reranker, CrossEncoder) and request.instruction is not None:
            raise InvalidRequest(
                f"`instruction` is for rerankers with a chat template, but {self.model_name!r} is an encoder that "
                "reads query and document alone: write the instruction into the query.",
                "instruction",
            )
        if self.reranker is not None:
            return await _by_reranker(request, compute, num_engines)
        if self.embedding_model is None:
            raise InvalidRequest(
                f"The model {self.model_name!r} generates text and scores no documents. Serve a reranker, such as "
                "Qwen3-Reranker, or an embedding model, such as Qwen3-Embedding, both with the files of "
                "sentence-transformers (modules.json), or an encoder, such as bge-reranker or bge-small.",
                "model",
            )
        if request.instruction is not None:
            raise InvalidRequest(
                f"`instruction` is for rerankers, but {self.model_name!r} is an embedding model: write the instruction "
                "into the query.",
                "instruction",
            )
        return await _by_cosine(request, compute, num_engines, self.embedding_model)


async def _by_cosine(request: ScoreRequest, compute: ComputeGroup, num_engines: int, model: EmbeddingModel) -> Scores:
    """Embed each text once, and return the cosines."""
    query_role, document_role = (
        name if request.is_search and name in model.prompts else None for name in (QUERY, DOCUMENT)
    )
    fields = {(query, query_role): field for query, field in _first(request.queries, request.query_fields)}
    for document, field in _first(request.documents, request.document_fields):
        fields.setdefault((document, document_role), field)
    requests = [
        _request(request, index, field, raw_prompt=text, prompt_name=role)
        for index, ((text, role), field) in enumerate(fields.items())
    ]
    found = await each(requests, compute, request.num_parallel, num_engines, max_open=request.max_open)
    vectors = dict(zip(fields, (np.frombuffer(vector, "<f4").astype(np.float64) for vector, _ in found), strict=True))
    values = (
        _cosine(vectors[query, query_role], vectors[document, document_role]) for query, document in request.pairs
    )
    return Scores(tuple(values), _num_tokens(found))


async def _by_reranker(request: ScoreRequest, compute: ComputeGroup, num_engines: int) -> Scores:
    """Compute each pair once, and return probabilities or log-odds, the logit of an encoder's only class."""
    fields = dict(_first(request.pairs, request.document_fields))
    requests = [
        _request(request, index, field, raw_prompt=document, scored_query=query, instruction=request.instruction)
        for index, ((query, document), field) in enumerate(fields.items())
    ]
    found = await each(requests, compute, request.num_parallel, num_engines, max_open=request.max_open)
    log_odds = {pair: float(np.frombuffer(score, "<f4")[0]) for pair, (score, _) in zip(fields, found, strict=True)}
    values = {pair: probability(value) if request.has_activation else value for pair, value in log_odds.items()}
    return Scores(tuple(values[pair] for pair in request.pairs), _num_tokens(found))


def probability(log_odds: float) -> float:
    """Return the probability with these log-odds, the logistic function, without overflow."""
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    return (odds := math.exp(log_odds)) / (1 + odds)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors of length 1; equal ones have 1, whatever they round to."""
    return float(np.clip(a @ b / ((np.linalg.norm(a) * np.linalg.norm(b)) or 1.0), -1.0, 1.0))


def _request(request: ScoreRequest, index: int, field: str, **what: Any) -> ChatRequest:
    return ChatRequest(
        request_id=f"{request.request_id}-{index}",
        messages=(),
        priority=request.priority,
        client=request.client,
        prompt_field=field,
        **what,
    )


def _first(values: Iterable[Any], fields: Iterable[str]) -> Iterable[tuple[Any, str]]:
    """Return each value with the field in which it occurs first."""
    found: dict[Any, str] = {}
    for value, field in zip(values, fields, strict=True):
        found.setdefault(value, field)
    return found.items()


def _num_tokens(found: Sequence[tuple[bytes, int]]) -> int:
    return sum(num_tokens for _, num_tokens in found)
