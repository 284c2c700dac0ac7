"""normalize: brings a canonical conversation into the order that chat templates accept, and the same text each time.

The rules are pure and idempotent, never mutate their input, and return a well-formed conversation unchanged. Two
messages merge only if nothing but text and parts must be joined, so that no tool call, id or name is lost.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from engine.errors import InvalidRequest
from engine.processing.message import Message, Part, text_part

SystemPolicy = Literal["hoist", "inline", "error"]
"""Treatment of a system message after another role: `hoist` moves it to the front; `inline` leaves it in place as
marked user text, so that the prefix before it stays the same from turn to turn; `error` refuses it."""

_PAIR = r"[ \t]*[\w.-]+=[^;\s]*"
DEFAULT_VOLATILE_PATTERNS = (re.compile(rf"(?i)^[ \t]*x-anthropic-billing-header:{_PAIR}(;{_PAIR})*;?[ \t]*$"),)
"""Lines of system prompts that agents write for their own service and that change with every request.

Claude Code's is `x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;`. A line with more
than such pairs is kept, since some proxies join the blocks of a prompt without a line break. Dates, directories and the
like are meant for the model and are kept.
"""

_IN_EVERY_MATCH = {DEFAULT_VOLATILE_PATTERNS[0]: "-header:"}
"""Pattern to a lower-case substring of everything that it matches, so that texts without it need not be split into
lines. None of its letters has a case variant that `re.IGNORECASE` knows and `str.lower` does not."""

INLINE_MARK = "[system] "

_MERGED_ROLES = {"system", "user", "assistant"}
_KEEPS_APART = ("tool_calls", "reasoning_content")


def normalize(
    messages: Iterable[Message],
    policy: SystemPolicy = "hoist",
    volatile_patterns: Sequence[re.Pattern[str]] = DEFAULT_VOLATILE_PATTERNS,
    keeps_late_system: bool = False,
) -> tuple[Message, ...]:
    """Normalize a conversation; idempotent.

    Args:
        messages: Canonical messages.
        policy: Treatment of system messages after other roles.
        volatile_patterns: A line of a system message is removed if one of these matches in it.
        keeps_late_system: The template accepts system messages anywhere, so all of them stay in place.

    Raises:
        InvalidRequest: The policy is `error` and refuses a message; the path is such as `messages[3].role`.
    """
    stable = [_without_volatile_lines(message, volatile_patterns) for message in messages]
    return tuple(_merge_neighbours(stable if keeps_late_system else _place_system_messages(stable, policy)))


def _without_volatile_lines(message: Message, patterns: Sequence[re.Pattern[str]]) -> Message:
    if message["role"] != "system" or not patterns:
        return message
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _stable_lines(content, patterns)}
    if content is None:
        return message
    parts = []
    for part in content:
        if part["type"] == "text":
            stable = _stable_lines(part["text"], patterns)
            if part["text"] and not stable and len(part) == 2:
                continue
            part = {**part, "text": stable}
        parts.append(part)
    return {**message, "content": parts}


def _stable_lines(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """Remove the volatile lines of a text. Each distinct line is searched once, and only if a pattern can match."""
    lowered = text.lower()
    possible = [pattern for pattern in patterns if _IN_EVERY_MATCH.get(pattern, "") in lowered]
    if not possible:
        return text
    lines = text.split("\n")
    volatile = {line for line in set(lines) if any(pattern.search(line.rstrip("\r")) for pattern in possible)}
    if not volatile:
        return text
    last = lines.pop()
    stable = [line + "\n" for line in lines if line not in volatile]
    return "".join(stable) + ("" if last in volatile else last)


def _place_system_messages(messages: list[Message], policy: SystemPolicy) -> list[Message]:
    num_leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    head, tail = messages[:num_leading], messages[num_leading:]
    rest = []
    for i, message in enumerate(tail, start=num_leading):
        if message["role"] != "system":
            rest.append(message)
        elif policy == "error":
            path = f"messages[{i}].role"
            late = f"`{path}` is that of a system message: system messages are only allowed at the start."
            raise InvalidRequest(late, path)
        elif message["content"] or _extras(message):  # one that says nothing vanishes
            if policy == "hoist":
                head.append(message)
            else:
                rest.append(_as_marked_user_text(message))
    return head + rest


def _as_marked_user_text(message: Message) -> Message:
    content = message["content"] or ""
    if isinstance(content, str):
        content = INLINE_MARK + content
    elif content[0]["type"] == "text":
        content = [{**content[0], "text": INLINE_MARK + content[0]["text"]}, *content[1:]]
    else:
        content = [text_part(INLINE_MARK), *content]
    return {**message, "role": "user", "content": content}


def _merge_neighbours(messages: Iterable[Message]) -> Iterator[Message]:
    run: list[Message] = []
    for message in messages:
        if run and not _may_merge(run[0], message):
            yield _merged(run)
            run = []
        run.append(message)
    if run:
        yield _merged(run)


def _merged(run: list[Message]) -> Message:
    return run[0] if len(run) == 1 else {**run[0], "content": _joined([message["content"] for message in run])}


def _may_merge(first: Message, second: Message) -> bool:
    return (
        first["role"] == second["role"]
        and first["role"] in _MERGED_ROLES
        and not any(_says_something(m.get(key)) for m in (first, second) for key in _KEEPS_APART)
        and _extras(first) == _extras(second)
    )


def _joined(contents: list[str | list[Part] | None]) -> str | list[Part] | None:
    """Join contents: texts with a blank line in between, parts in order; empty and null contents add nothing.

    Joining the whole run at once avoids the quadratic copying of pairwise joins.
    """
    filled = [content for content in contents if content]
    if not filled:
        return next((content for content in contents if content is not None), None)
    if len(filled) == 1:
        return filled[0]
    if all(isinstance(content, str) for content in filled):
        return "\n\n".join(content for content in filled if isinstance(content, str))
    groups: list[list[Part]] = []  # each becomes one part
    for content in filled:
        pieces = [text_part(content)] if isinstance(content, str) else content
        if groups and _is_plain_text(groups[-1][-1]) and _is_plain_text(pieces[0]):
            groups[-1].append(pieces[0])
            pieces = pieces[1:]
        groups += [[piece] for piece in pieces]
    return [group[0] if len(group) == 1 else text_part("\n\n".join(part["text"] for part in group)) for group in groups]


def _is_plain_text(part: Part) -> bool:
    return part["type"] == "text" and len(part) == 2


def _extras(message: Message) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in ("role", "content") and _says_something(v)}


def _says_something(value: Any) -> bool:
    return value is not None and value != "" and value != [] and value != {}
