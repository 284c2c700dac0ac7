"""OPENAI: chat completions, completions, embeddings, and vLLM's rerank, score, tokenize and detokenize."""

from deployments.http.dialect import Dialect
from deployments.http.openai import rerank, score
from deployments.http.openai.chat import ChatCompletions
from deployments.http.openai.chat_wire import parse_chat
from deployments.http.openai.completions import Completions
from deployments.http.openai.completions_wire import parse_completions
from deployments.http.openai.embeddings import EmbeddingsEndpoint
from deployments.http.openai.embeddings_wire import parse_embeddings
from deployments.http.openai.error_form import ERRORS
from deployments.http.openai.rerank import Rerank
from deployments.http.openai.rerank_wire import parse_rerank
from deployments.http.openai.score import Score
from deployments.http.openai.score_wire import parse_score
from deployments.http.openai.tokenization import Tokenization
from deployments.http.openai.tokenization_wire import parse_detokenize, parse_tokenize

OPENAI = Dialect(
    name="openai",
    prefixes=(
        *("/v1", "/api/v1"),  # the second is where some clients look for the first
        *("/v2", "/rerank", "/score", "/tokenize", "/detokenize"),
    ),
    errors=ERRORS,
    bodies={
        "chat": parse_chat,
        "completions": parse_completions,
        "embeddings": parse_embeddings,
        "rerank": parse_rerank,
        "score": parse_score,
        "tokenize": parse_tokenize,
        "detokenize": parse_detokenize,
    },
    endpoints=(ChatCompletions, Completions, EmbeddingsEndpoint, Rerank, Score, Tokenization),
    apis={
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/v1/embeddings": "embeddings",
        **{path: "rerank" for path in rerank.PATHS},
        **{path: "score" for path in score.PATHS},
        "/v1/tokenize": "tokenization",
        "/v1/detokenize": "tokenization",
        "/tokenize": "tokenization",
        "/detokenize": "tokenization",
    },
    answer_ids=("chatcmpl-", "cmpl-", "embd-", rerank.ID_PREFIX, score.ID_PREFIX, "tok-"),
    traced_as={
        "/v1/embeddings": "embeddings",
        "/v1/completions": "text_completion",
        **{path: "rerank" for path in rerank.PATHS},
        **{path: "score" for path in score.PATHS},
    },
)
