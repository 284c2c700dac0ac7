"""read_request: parses a body of any dialect; a pure function of the body and the server's rules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from deployments.http.anthropic.messages_wire import parse_count_tokens, parse_messages
from deployments.http.json_body import parse_json_object
from deployments.http.openai.chat_wire import parse_chat
from deployments.http.openai.completions_wire import parse_completions
from deployments.http.openai.embeddings_wire import parse_embeddings
from deployments.http.openai.tokenization_wire import parse_detokenize, parse_tokenize
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses
from deployments.placement.conversation_keys import MAX_SESSION_CHARS, sketch_conversation, sketch_raw
from deployments.protocol import ChatRequest

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
    """Parse, validate and normalize a body, and sketch its prompt. Raises InvalidRequest, ModelNotFound."""
    raw = parse_json_object(body)
    parsed = PARSERS[dialect](raw, rules)
    if not isinstance(parsed.request, ChatRequest):
        return parsed
    session = raw.get("prompt_cache_key")
    request = replace(parsed.request, session=session[:MAX_SESSION_CHARS] if isinstance(session, str) else "")
    return replace(parsed, request=sketched(request))


def sketched(request: ChatRequest) -> ChatRequest:
    """Return the request with the sketch of its prompt."""
    if request.raw_prompt is not None:
        return replace(request, sketch=sketch_raw(request.raw_prompt))
    tools = [tool.definition for tool in request.tools if not tool.is_deferred]
    return replace(request, sketch=sketch_conversation(request.messages, tools))


def is_cheap(body: bytes, rules: ReadingRules) -> bool:
    """Tell whether a body can be parsed fast enough for the event loop."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
