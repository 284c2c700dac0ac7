"""The wire models of chat messages and their parts, and their conversion to canonical messages.

Unknown keys inside a message are dropped: clients send back fields of other servers, which a template must not see.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.http.custom_tool import arguments_of
from deployments.http.parsed_request import ReadingRules
from deployments.http.wire import STRING_OR_ARRAY, OpenWire, choose, tag
from engine.processing.message import Message, Part, image_part, text_part, video_part

MAX_PARTS = 2048
"""Content parts of one message."""

MAX_TOOL_CALLS = 512
"""Tool calls of one message."""

MAX_NAME_CHARS = 256
"""Characters of a participant's or function's name in the history."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_MEDIA_KINDS = {
    "audio_url": "audio",
    "audio": "audio",
    "input_audio": "audio",
    "file": "file",
}
"""Type of a content part to its kind of media, none of which a model reads yet."""

_PART_TAGS = dict.fromkeys(_MEDIA_KINDS, "media") | {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "image",
    "video_url": "video_url",
    "input_video": "video_url",
    "video": "video",
}


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else "user"
    return role if isinstance(role, str) else None


def _type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return _PART_TAGS.get(kind) if isinstance(kind, str) else None


class TextPart(OpenWire):
    """A part of text, of a request or of an earlier answer."""

    type: str
    text: str

    def canonical(self) -> Part:
        return text_part(self.text)


class RefusalPart(OpenWire):
    """An assistant's refusal in the history, which becomes text."""

    type: str
    refusal: str

    def canonical(self) -> Part:
        return text_part(self.refusal)


class ThinkingPart(OpenWire):
    """An assistant's thought in the history."""

    type: str
    thinking: str


Detail = Literal["auto", "low", "high", "original"]


class ImageSource(OpenWire):
    """The URL or data: URL of an image. Only the detail `low` changes the image."""

    url: str = Field(min_length=1)
    detail: Detail | None = None


Image = Annotated[ImageSource, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


class ImageUrlPart(OpenWire):
    """An image in OpenAI's form, with the source in `image_url`."""

    type: str
    image_url: Image
    detail: Detail | None = None

    def canonical(self) -> Part:
        return image_part(self.image_url.url, "low" in (self.image_url.detail, self.detail))


class ImagePart(OpenWire):
    """An image with the source in `image`."""

    type: str
    image: Image

    def canonical(self) -> Part:
        return image_part(self.image.url, self.image.detail == "low")


class VideoSource(OpenWire):
    """The URL or data: URL of a video."""

    url: str = Field(min_length=1)


Video = Annotated[VideoSource, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


class VideoUrlPart(OpenWire):
    """A video with the source in `video_url`."""

    type: str
    video_url: Video

    def canonical(self) -> Part:
        return video_part(self.video_url.url)


class VideoPart(OpenWire):
    """A video with the source in `video`."""

    type: str
    video: Video

    def canonical(self) -> Part:
        return video_part(self.video.url)


class MediaPart(OpenWire):
    """Audio and files, which are refused with an error that names the kind of media."""

    type: str


WirePart = Annotated[
    Annotated[TextPart, tag("text")]
    | Annotated[RefusalPart, tag("refusal")]
    | Annotated[ThinkingPart, tag("thinking")]
    | Annotated[ImageUrlPart, tag("image_url")]
    | Annotated[ImagePart, tag("image")]
    | Annotated[VideoUrlPart, tag("video_url")]
    | Annotated[VideoPart, tag("video")]
    | Annotated[MediaPart, tag("media")],
    choose(_type, f"must be one of: {', '.join(sorted(_PART_TAGS))}", "type"),
]
Parts = Annotated[list[WirePart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Annotated[str, tag("string")] | Annotated[Parts, tag("array")], STRING_OR_ARRAY]


def canonical_content(content: str | list[Any] | None) -> str | list[Part] | None:
    """Convert content: text is kept, thinking parts are dropped, other parts become canonical."""
    if not isinstance(content, list):
        return content
    return [part.canonical() for part in content if not isinstance(part, ThinkingPart)]


def _check_media(content: str | list[Any] | None, path: str, rules: ReadingRules) -> None:
    """Raise InvalidRequest for a part that the model does not read."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, MediaPart):
            rules.check_media(_MEDIA_KINDS[part.type], f"{path}[{i}]")
        elif isinstance(part, ImageUrlPart | ImagePart):
            rules.check_media("image", f"{path}[{i}]")
        elif isinstance(part, VideoUrlPart | VideoPart):
            rules.check_media("video", f"{path}[{i}]")


def _json_text(value: Any) -> Any:
    """Convert arguments that a client sends as an object (Ollama's form) to JSON text."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else "" if value is None else value


class FunctionCall(OpenWire):
    """The name and arguments of a call in an earlier answer; arguments sent as an object become JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: Annotated[str, BeforeValidator(_json_text)] = ""

    def canonical(self, id: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCall(OpenWire):
    """A call of a function in an earlier answer."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall

    def canonical(self) -> dict[str, Any]:
        return self.function.canonical(self.id)


class CustomInput(OpenWire):
    """The name of a custom tool and the text of a call."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    input: str


class CustomCall(OpenWire):
    """A call of a custom tool in an earlier answer, which the model sees as one of a function."""

    id: str = Field(min_length=1)
    type: Literal["custom"]
    custom: CustomInput

    def canonical(self) -> dict[str, Any]:
        return FunctionCall(name=self.custom.name, arguments=arguments_of(self.custom.input)).canonical(self.id)


def _call_tag(call: Any) -> str | None:
    kind = call.get("type", "function") if isinstance(call, dict) else "function"
    return kind if kind in ("function", "custom") else None


WireCall = Annotated[
    Annotated[ToolCall, tag("function")] | Annotated[CustomCall, tag("custom")],
    choose(_call_tag, "must be one of: function, custom", "type"),
]


class PlainMessage(OpenWire):
    """A system, developer or user message. The prompt has `name` in brackets before the content."""

    role: Literal["system", "developer", "user"]
    content: Content | None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class AssistantMessage(OpenWire):
    """An earlier answer of the model, with its thought and its calls."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[WireCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None


class ToolMessage(OpenWire):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str = Field(min_length=1)
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class FunctionMessage(OpenWire):
    """The result of the last preceding call of the legacy function `name`."""

    role: Literal["function"]
    content: Content | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


WireMessage = Annotated[
    Annotated[PlainMessage, tag("system")]
    | Annotated[PlainMessage, tag("developer")]
    | Annotated[PlainMessage, tag("user")]
    | Annotated[AssistantMessage, tag("assistant")]
    | Annotated[ToolMessage, tag("tool")]
    | Annotated[FunctionMessage, tag("function")],
    choose(_role, f"must be one of: {', '.join(ROLES)}", "role"),
]


def canonical_messages(messages: Iterable[Any], rules: ReadingRules) -> Iterator[Message]:
    """Yield one canonical message per message. Raises InvalidRequest for media that the model does not read."""
    open_calls: dict[str, str] = {}  # name of a legacy function to the id of its last call
    for i, message in enumerate(messages):
        _check_media(message.content, f"messages[{i}].content", rules)
        match message:
            case PlainMessage():
                content = _with_name(canonical_content(message.content), message.name)
                role = "system" if message.role == "developer" else message.role
                yield {"role": role, "content": "" if content is None else content}
            case AssistantMessage():
                if message.function_call is not None:
                    open_calls[message.function_call.name] = f"call_{i}"
                yield _canonical_assistant(message, f"call_{i}")
            case ToolMessage():
                named = {} if message.name is None else {"name": message.name}
                yield {"role": "tool", "content": _result(message), "tool_call_id": message.tool_call_id, **named}
            case FunctionMessage():
                id = open_calls.get(message.name, f"call_{i}")
                yield {"role": "tool", "content": _result(message), "tool_call_id": id, "name": message.name}


def _canonical_assistant(message: AssistantMessage, legacy_id: str) -> Message:
    content = _with_name(canonical_content(message.content), message.name)
    canonical: Message = {"role": "assistant", "content": content or message.refusal or content}
    if thought := message.reasoning_content or message.reasoning or _thought_in(message.content):
        canonical["reasoning_content"] = thought
    calls = [call.canonical() for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(message.function_call.canonical(legacy_id))
    if calls:
        canonical["tool_calls"] = calls
    return canonical


def _thought_in(content: str | list[Any] | None) -> str:
    parts = content if isinstance(content, list) else []
    return "\n".join(part.thinking for part in parts if isinstance(part, ThinkingPart))


def _result(message: ToolMessage | FunctionMessage) -> str | list[Part]:
    return canonical_content(message.content) or ""


def _with_name(content: str | list[Part] | None, name: str | None) -> str | list[Part] | None:
    """Prefix the content with the participant's name, for which chat templates have no field."""
    if not name or not content:
        return content
    if isinstance(content, str):
        return f"[{name}] {content}"
    if content[0]["type"] == "text":
        return [text_part(f"[{name}] {content[0]['text']}"), *content[1:]]
    return [text_part(f"[{name}] "), *content]
