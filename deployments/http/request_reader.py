"""read_request: parses a body of any dialect; a pure function of the body and the server's rules."""

from collections.abc import Callable
from typing import Any, Literal

from deployments.http.anthropic.messages_wire import parse_count_tokens, parse_messages
from deployments.http.json_body import parse_json_object
from deployments.http.openai.chat_wire import parse_chat
from deployments.http.openai.completions_wire import parse_completions
from deployments.http.openai.embeddings_wire import parse_embeddings
from deployments.http.openai.tokenization_wire import parse_detokenize, parse_tokenize
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses

MAX_INLINE_BYTES = 256 * 2**10
"""Largest body that is parsed on the event loop."""

MAX_INLINE_MARKS = 8192
"""Most brackets, commas and quotes in a body that is parsed on the event loop. They determine the time much more than
the bytes: 8192 of them take up to 20 ms, and 256 kB may have enough for 150 ms."""

Dialect = Literal[
    "chat", "completions", "embeddings", "tokenize", "detokenize", "responses", "messages", "count_tokens"
]

PARSERS: dict[Dialect, Callable[[dict[str, Any], ReadingRules], ParsedRequest]] = {
    "chat": parse_chat,
    "completions": parse_completions,
    "embeddings": parse_embeddings,
    "tokenize": parse_tokenize,
    "detokenize": parse_detokenize,
    "responses": parse_responses,
    "messages": parse_messages,
    "count_tokens": parse_count_tokens,
}
"""Validate and normalize the JSON object of a body. Each raises InvalidRequest, ModelNotFound."""


def read_request(body: bytes, dialect: Dialect, rules: ReadingRules) -> ParsedRequest:
    """Parse, validate and normalize a body. Raises InvalidRequest, ModelNotFound."""
    return PARSERS[dialect](parse_json_object(body), rules)


def is_cheap(body: bytes, rules: ReadingRules) -> bool:
    """Tell whether a body can be parsed fast enough for the event loop."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
