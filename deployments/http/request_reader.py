"""read_request: the body of a request that generates -> what it asks for, by nothing of the server but its rules."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from deployments.chat import ChatRequest, PackedMessages, Route
from deployments.http.errors import ModelNotFound
from deployments.http.json_body import parse_json_object
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy

MAX_INLINE_BYTES = 256 * 2**10
"""Bytes of a body that may be read on the event loop."""

MAX_INLINE_MARKS = 8192
"""Brackets, commas and quotes of such a body. The time that reading takes grows with these much more than with the
bytes: 8192 of them take up to 20 ms, in 256 kB there may be enough for 150 ms."""


@dataclass(frozen=True)
class ReadingRules:
    """The server's settings that decide how a body is read."""

    model_name: str
    """The name of the model in answers."""
    media_kinds: frozenset[str]
    """Kinds of media that the model reads besides text."""
    keeps_late_system: bool = False
    """See `normalize`."""
    system_policy: SystemPolicy = "hoist"
    volatile_patterns: tuple[re.Pattern[str], ...] = DEFAULT_VOLATILE_PATTERNS
    aliases: frozenset[str] = frozenset()
    """Other names that `model` may have."""
    unknown_fields: Literal["report", "refuse"] = "report"
    """Unknown fields at the top of a body: ignored and named in a header, or refused."""

    @cached_property
    def may_backtrack(self) -> bool:
        """Whether some pattern is the operator's own, so that nothing is known of the time that it takes."""
        return not set(self.volatile_patterns) <= set(DEFAULT_VOLATILE_PATTERNS)

    def check_model(self, asked: str) -> None:
        """Raises ModelNotFound."""
        if asked != self.model_name and asked not in self.aliases:
            raise ModelNotFound(asked, self.model_name)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed body of any dialect. It crosses a process wall: everything in it can be pickled."""

    request: ChatRequest
    """Without an id."""
    route: Route
    stream: bool
    echo: Any = None
    """The fields of the body that the dialect's encoder depends on."""
    ignored: tuple[str, ...] = ()
    """Names of unknown fields at the top of the body."""

    def packed(self) -> "ParsedRequest":
        """The same with messages that are cheap to hand on."""
        return replace(self, request=replace(self.request, messages=PackedMessages.of(self.request.messages)))


Parser = Callable[[dict[str, Any], ReadingRules], ParsedRequest]
"""Validates and normalizes the JSON object of a body. Raises InvalidRequest, ModelNotFound."""

Dialect = Literal[
    "chat", "completions", "embeddings", "tokenize", "detokenize", "responses", "messages", "count_tokens"
]


def read_request(body: bytes, dialect: Dialect, rules: ReadingRules) -> ParsedRequest:
    """Raises InvalidRequest, ModelNotFound."""
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
    """Whether reading a body takes so little time that the event loop can do it."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
