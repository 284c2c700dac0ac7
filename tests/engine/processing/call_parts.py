"""Joins the parts of calls."""

from collections.abc import Iterable

from engine.processing.tool_arguments import ParsedToolCall


def joined(parts: Iterable[ParsedToolCall]) -> list[ParsedToolCall]:
    """Return the calls; the last one may be incomplete."""
    calls: list[ParsedToolCall] = []
    for part in parts:
        assert part.is_first == (not calls or calls[-1].is_last) and bool(part.name) == part.is_first
        if part.is_first:
            calls.append(part)
        else:
            calls[-1] = calls[-1].joined(part)
    return calls
