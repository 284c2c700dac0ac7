"""read_chat: the body of a chat completion -> what it asks for, without anything of the server but its rules."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

from deployments.chat import ChatRequest, PackedMessages, Route
from deployments.http.classify import classify, reject_unsupported_media
from deployments.http.errors import ModelNotFound
from deployments.http.json_body import parse_json_object
from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy, normalize
from deployments.http.wire import parse_chat_completion, request_fields

MAX_INLINE_BYTES = 256 * 2**10
"""Bytes of a body that may be read on the event loop."""

MAX_INLINE_MARKS = 8192
"""Brackets, commas and quotes of such a body. The time that reading takes grows with these much more than with the
bytes: 8192 of them take up to 20 ms, in 256 kB there may be enough for 150 ms."""


@dataclass(frozen=True)
class ChatRules:
    """What decides how a body is read, besides the body."""

    model_name: str
    """The one name that `model` may have."""
    media_kinds: frozenset[str]
    """What the model reads besides text."""
    keeps_late_system: bool = False
    """See `normalize`."""
    system_policy: SystemPolicy = "hoist"
    volatile_patterns: tuple[re.Pattern[str], ...] = DEFAULT_VOLATILE_PATTERNS

    @cached_property
    def may_backtrack(self) -> bool:
        """Whether some pattern is the operator's own, so that nothing is known of the time that it takes."""
        return not set(self.volatile_patterns) <= set(DEFAULT_VOLATILE_PATTERNS)


@dataclass(frozen=True)
class ReadChat:
    """What a body asks for."""

    request: ChatRequest
    """Without an id."""
    route: Route
    stream: bool
    include_usage: bool

    def packed(self) -> "ReadChat":
        """The same with messages that are cheap to hand on."""
        return replace(self, request=replace(self.request, messages=PackedMessages.of(self.request.messages)))


def read_chat(body: bytes, rules: ChatRules) -> ReadChat:
    """Parse, validate and normalize a body.

    Raises:
        InvalidRequest: the body breaks a rule; ModelNotFound if it names another model.
    """
    raw = parse_json_object(body)
    wire = parse_chat_completion(raw)
    if wire.model != rules.model_name:
        raise ModelNotFound(wire.model, rules.model_name)
    reject_unsupported_media(raw["messages"], rules.media_kinds)
    messages = normalize(raw["messages"], rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    request = ChatRequest(request_id="", messages=messages, **request_fields(wire))
    options = wire.stream_options
    return ReadChat(
        request,
        classify(messages),
        stream=bool(wire.stream),
        include_usage=options is not None and bool(options.include_usage),
    )


def is_cheap(body: bytes, rules: ChatRules) -> bool:
    """Whether reading a body takes so little time that the event loop can do it."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
