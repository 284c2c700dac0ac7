"""Conversation: a client's messages and template variables in the form of a chat template, control strings escaped."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from engine.errors import InvalidRequest
from engine.processing.control_tokens import ControlTokenEscaper
from engine.processing.json_shape import MAX_JSON_VALUES, check_json_shape
from engine.processing.message import Part, text_part

MAX_ARGUMENTS_DEPTH = 256
"""Deepest nesting of arrays and objects in the arguments of a tool call."""

DAMAGED = "arguments"
"""Name under which templates that read objects get arguments that are no JSON object."""


@cache
def reserved_kwargs() -> frozenset[str]:
    """Return the template variables that a client may not set, as they are arguments of the rendering itself."""
    from transformers import PreTrainedTokenizerFast  # takes a second, so only processes that render import it

    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    return frozenset(parameters) - {"tools", "documents", "kwargs"} | {"messages"}


DEFAULT_KWARGS: Mapping[str, Any] = {"enable_thinking": False}
"""Default values of template variables."""


@dataclass(frozen=True)
class TemplateForms:
    """Forms of input that the template accepts."""

    accepts_parts: bool
    """Whether it accepts a list of text parts as content."""
    image_in_text: str | None = None
    """Text in the place of an image, for a template without parts; None: it gets contents with images unchanged."""
    argument_texts: bool = False
    """Whether it accepts the arguments of a tool call as JSON text instead of an object."""
    thought_key: str | None = "reasoning_content"
    """Key of the thought of an earlier message; None: it drops such thoughts."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form of a chat template."""

    messages: list[dict[str, Any]]
    """Copies, with text parts joined if the template does not accept parts."""
    kwargs: dict[str, Any]
    """Template variables."""
    quarantine: ControlTokenEscaper
    """The control strings that are escaped in both."""
    num_images: int
    """Images and videos."""


def convert(
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    quarantine: ControlTokenEscaper,
    forms: TemplateForms,
) -> Conversation:
    """Convert a conversation to the form of the template. Raises InvalidRequest naming the invalid field."""
    _check_arguments(messages)
    try:
        converted = [_convert(message, quarantine, forms) for message in messages]
        kwargs = {**DEFAULT_KWARGS, **quarantine.value(_checked_kwargs(template_kwargs))}
    except RecursionError:
        raise InvalidRequest("the messages or tools are nested too deeply", "messages") from None
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return Conversation(converted, kwargs, quarantine, sum(part["type"] != "text" for part in parts))


def _convert(message: Mapping[str, Any], quarantine: ControlTokenEscaper, forms: TemplateForms) -> dict[str, Any]:
    converted = {k: quarantine.value(v) for k, v in message.items() if k not in ("content", "tool_calls")}
    if (content := message.get("content")) is not None:
        # An assistant's <think> and <tool_call> are left to the template, but its special tokens are escaped.
        control = quarantine.control
        pattern = control.special if message.get("role") == "assistant" else control.every
        converted["content"] = _convert_content(content, quarantine, pattern, forms)
    if forms.thought_key not in (None, "reasoning_content") and "reasoning_content" in converted:
        converted[forms.thought_key] = converted.pop("reasoning_content")
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [quarantine.value(_convert_call(call, forms)) for call in calls]
    return converted


def _convert_content(
    content: str | list[Part], quarantine: ControlTokenEscaper, pattern: re.Pattern[str], forms: TemplateForms
) -> str | list[Part]:
    """Convert content: images and videos become the template's {"type": "image"}, control strings are escaped.

    For a template without parts they become text, where the family has one.
    """
    if isinstance(content, str):
        return quarantine.text(content, pattern)
    parts: list[Part] = []
    for is_text, run in groupby(content, key=lambda part: part["type"] == "text"):
        if is_text:
            parts += map(text_part, _joined_if_control([part["text"] for part in run], pattern))
        else:
            parts += [{"type": "video" if part["type"] == "video_url" else "image"} for part in run]
    if not forms.accepts_parts and all(part["type"] == "text" for part in parts):
        return quarantine.text("\n".join(part["text"] for part in parts), pattern)
    if not forms.accepts_parts and (image := forms.image_in_text) is not None:
        return "".join(
            quarantine.text("\n".join(part["text"] for part in run), pattern) if is_text else image * len(list(run))
            for is_text, run in groupby(parts, key=lambda part: part["type"] == "text")
        )
    return [text_part(quarantine.text(part["text"], pattern)) if part["type"] == "text" else part for part in parts]


def _checked_kwargs(template_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in template_kwargs:
        if name in reserved_kwargs():
            raise InvalidRequest(f"{name!r} cannot be set for the chat template", f"chat_template_kwargs.{name}")
    return template_kwargs


def _joined_if_control(texts: list[str], control: re.Pattern[str]) -> list[str]:
    """Return adjacent texts unchanged, or joined if a control string spans several of them."""
    joined = "".join(texts)
    alone = [found for text in texts for found in control.findall(text)]
    return texts if control.findall(joined) == alone else [joined]


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check depth and size of tool call arguments: JSON in strings, which the limits of the body do not count."""
    max_values = MAX_JSON_VALUES
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            if isinstance(arguments := call["function"].get("arguments"), str):
                field = f"messages[{i}].tool_calls[{j}].function.arguments"
                subject = "The JSON in the arguments of the tool calls"
                text = arguments.encode(errors="replace")
                max_values -= check_json_shape(text, subject, field, max_values, max_depth=MAX_ARGUMENTS_DEPTH)


def _convert_call(call: Mapping[str, Any], forms: TemplateForms) -> dict[str, Any]:
    parsed = _parse_arguments(call)
    if not forms.argument_texts:
        return parsed
    given, arguments = call["function"].get("arguments"), parsed["function"]["arguments"]
    text = given if isinstance(given, str) and given.strip() else json.dumps(arguments, ensure_ascii=False)
    return {**parsed, "function": {**parsed["function"], "arguments": text}}


def _parse_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tool call with its arguments parsed, as clients send JSON text and templates read objects.

    Text that is no JSON object, such as that of an answer that was cut off, is shown to the model as it is, and so is
    JSON that spells unpaired surrogates, which are not characters.
    """
    function = call["function"]
    given = function.get("arguments")
    arguments = given or {}
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given.strip() else {}
            if "\\u" in given:
                json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            arguments = {DAMAGED: given}
    if not isinstance(arguments, Mapping):
        arguments = {DAMAGED: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
    return {**call, "function": {**function, "arguments": arguments}}
