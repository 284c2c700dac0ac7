"""read_request: parses a body of any dialect; a pure function of the body and the server's rules."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from deployments.http.errors import ModelNotFound
from deployments.http.json_body import parse_json_object
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy
from deployments.protocol import ChatRequest, PackedMessages, Route

MAX_INLINE_BYTES = 256 * 2**10
"""Largest body that is parsed on the event loop."""

MAX_INLINE_MARKS = 8192
"""Most brackets, commas and quotes in a body that is parsed on the event loop. They determine the time much more than
the bytes: 8192 of them take up to 20 ms, and 256 kB may have enough for 150 ms."""


@dataclass(frozen=True)
class ReadingRules:
    """The server's settings that affect how a body is parsed."""

    model_name: str
    """The name of the model in answers."""
    media_kinds: frozenset[str]
    """Kinds of media that the model reads besides text."""
    keeps_late_system: bool = False
    """See `normalize`."""
    system_policy: SystemPolicy = "hoist"
    volatile_patterns: tuple[re.Pattern[str], ...] = DEFAULT_VOLATILE_PATTERNS
    aliases: frozenset[str] = frozenset()
    """Additional names that `model` may have."""
    unknown_fields: Literal["report", "refuse"] = "report"
    """Whether unknown fields at the top of a body are ignored and reported, or refused."""

    @cached_property
    def may_backtrack(self) -> bool:
        """Whether a pattern is the operator's own, whose matching time is unbounded."""
        return not set(self.volatile_patterns) <= set(DEFAULT_VOLATILE_PATTERNS)

    def check_model(self, asked: str) -> None:
        """Raise ModelNotFound for a name that is neither the model's nor an alias."""
        if asked != self.model_name and asked not in self.aliases:
            raise ModelNotFound(asked, self.model_name)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed body of any dialect. It is pickled between processes."""

    request: ChatRequest
    """Its request_id is ''."""
    route: Route
    stream: bool
    echo: Any = None
    """Fields of the body that the dialect's encoder depends on."""
    ignored: tuple[str, ...] = ()
    """Names of unknown fields at the top of the body."""

    def packed(self) -> "ParsedRequest":
        """Return a copy with packed messages, which are cheap to pickle."""
        return replace(self, request=replace(self.request, messages=PackedMessages.of(self.request.messages)))


Parser = Callable[[dict[str, Any], ReadingRules], ParsedRequest]
"""Validates and normalizes a body's JSON object for a dialect. Raises InvalidRequest, ModelNotFound."""

Dialect = Literal[
    "chat", "completions", "embeddings", "tokenize", "detokenize", "responses", "messages", "count_tokens"
]


def read_request(body: bytes, dialect: Dialect, rules: ReadingRules) -> ParsedRequest:
    """Parse, validate and normalize a body. Raises InvalidRequest, ModelNotFound."""
    return _parser(dialect)(parse_json_object(body), rules)


def _parser(dialect: Dialect) -> Parser:
    from deployments.http.anthropic.messages_wire import parse_count_tokens, parse_messages
    from deployments.http.openai.chat_wire import parse_chat
    from deployments.http.openai.completions_wire import parse_completions
    from deployments.http.openai.embeddings_wire import parse_embeddings
    from deployments.http.openai.tokenization_wire import parse_detokenize, parse_tokenize
    from deployments.http.responses.body import parse_responses

    parsers: dict[str, Parser] = {
        "chat": parse_chat,
        "completions": parse_completions,
        "embeddings": parse_embeddings,
        "tokenize": parse_tokenize,
        "detokenize": parse_detokenize,
        "responses": parse_responses,
        "messages": parse_messages,
        "count_tokens": parse_count_tokens,
    }
    return parsers[dialect]


def is_cheap(body: bytes, rules: ReadingRules) -> bool:
    """Tell whether a body can be parsed fast enough for the event loop."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
