"""Converts items of the Responses API to the canonical conversation."""

from collections.abc import Iterable, Sequence
from typing import Any

from deployments.http.classify import classify
from deployments.http.custom_tool import arguments_of
from deployments.http.normalize import normalize
from deployments.http.parsed_request import ReadingRules
from deployments.http.responses.items import Item
from deployments.http.responses.tools import full_name
from deployments.requests import Route
from engine.errors import InvalidRequest
from engine.processing.message import Message, Part, image_part, text_part

CALLS = ("function_call", "custom_tool_call")
"""Types of items that are calls of tools."""


def conversation(
    items: Iterable[Item], instructions: str | None, rules: ReadingRules
) -> tuple[tuple[Message, ...], Route]:
    """Return the normalized messages of items without references, and their route. Raises InvalidRequest."""
    leading = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*leading, *messages_of(items)]
    if not messages:
        raise InvalidRequest("`input` is empty: it must be a string or contain at least one item.", "input")
    try:
        normal = normalize(messages, rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    except InvalidRequest as error:  # with a path into messages that the client has never seen
        raise InvalidRequest(
            "`input` has a system or developer message after another role: they are only allowed at the start.",
            "input",
        ) from error
    return normal, classify(normal)


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Convert input and output items to messages, in order.

    Consecutive reasoning, text and calls of the assistant become one message.
    """
    messages: list[Message] = []
    turn = AssistantTurn()
    for item in items:
        if item["type"] in ("reasoning", *CALLS) or item.get("role") == "assistant":
            if turn.ends_before(item):
                messages += turn.messages
                turn = AssistantTurn()
            turn.add(item)
            continue
        messages += turn.messages
        turn = AssistantTurn()
        messages.append(_message_of(item))
    return messages + turn.messages


class AssistantTurn:
    """Collects the items of one assistant message."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._has_message = False

    def ends_before(self, item: Item) -> bool:
        """Tell whether the item starts a new message; never after a call, which its result must follow."""
        return item["type"] not in CALLS and bool(self._texts) and not self._calls

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                self._thoughts += filter(None, [_thought(item)])
            case "function_call" | "custom_tool_call":
                self._calls.append(_call(item))
            case _:
                self._has_message = True
                self._texts += filter(None, ["".join(map(_text, item["content"]))])

    @property
    def messages(self) -> list[Message]:
        """One message; none without items."""
        if not (self._thoughts or self._calls or self._has_message):
            return []
        content = "\n\n".join(self._texts) if self._texts else None if self._calls else ""
        message: Message = {"role": "assistant", "content": content}
        if self._thoughts:
            message["reasoning_content"] = "\n\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return [message]


def _thought(item: Item) -> str:
    content = item.get("content") or ()
    if content:
        return "".join(part["text"] for part in content)
    return "\n\n".join(part["text"] for part in item.get("summary") or ())


def _call(item: Item) -> dict[str, Any]:
    arguments = arguments_of(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
    function = {"name": full_name(item["name"], item.get("namespace")), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _message_of(item: Item) -> Message:
    if item["type"] in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "content": _content(item["output"]), "tool_call_id": item["call_id"]}
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": _content(item["content"])}


def _content(parts: str | Sequence[Item]) -> str | list[Part]:
    """Convert content; a list with a single text becomes this text, so that both give the same prompt."""
    if isinstance(parts, str):
        return parts
    canonical = [_part(part) for part in parts]
    if not canonical:
        return ""
    return canonical[0]["text"] if len(canonical) == 1 and canonical[0]["type"] == "text" else canonical


def _part(part: Item) -> Part:
    if part["type"] != "input_image":
        return text_part(_text(part))
    return image_part(part["image_url"], part["detail"] == "low")


def _text(part: Item) -> str:
    return part["refusal"] if part["type"] == "refusal" else part["text"]
