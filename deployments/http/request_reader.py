"""read_request: parses a body of any dialect; a pure function of the body and the server's rules."""

from dataclasses import replace

from deployments.http.dialects import DIALECTS
from deployments.http.json_body import parse_json_object
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.sketch import sketched
from deployments.placement.conversation_keys import MAX_SESSION_CHARS
from deployments.requests import ChatRequest

MAX_INLINE_BYTES = 256 * 2**10
"""Largest body that is parsed on the event loop."""

MAX_INLINE_MARKS = 8192
"""Most brackets, commas and quotes in a body that is parsed on the event loop. They determine the time much more than
the bytes: 8192 of them take up to 20 ms, and 256 kB may have enough for 150 ms."""


def read_request(body: bytes, kind: str, rules: ReadingRules) -> ParsedRequest:
    """Parse, validate and normalize a body of a kind of Dialect.bodies, and sketch its prompt.

    Raises InvalidRequest, ModelNotFound.
    """
    raw = parse_json_object(body)
    parsed = DIALECTS.parsers[kind](raw, rules)
    if not isinstance(parsed.request, ChatRequest):
        return parsed
    session = raw.get("prompt_cache_key")
    request = replace(parsed.request, session=session[:MAX_SESSION_CHARS] if isinstance(session, str) else "")
    return replace(parsed, request=sketched(request))


def is_cheap(body: bytes, rules: ReadingRules) -> bool:
    """Tell whether a body can be parsed fast enough for the event loop."""
    if len(body) > MAX_INLINE_BYTES or rules.may_backtrack:
        return False
    return sum(map(body.count, (b'"', b",", b"{", b"}", b"[", b"]"))) <= MAX_INLINE_MARKS
