"""The wire models of chat messages and their parts."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from deployments.chat import MEDIA_KINDS
from deployments.http.normalize import ROLES
from deployments.http.wire import STRING_OR_ARRAY, Wire, choose, tag

MAX_PARTS = 2048
"""Content parts of one message."""

MAX_TOOL_CALLS = 512
"""Tool calls of one message."""


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else "user"
    return role if isinstance(role, str) else None


def _type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return _PART_TAGS.get(kind) if isinstance(kind, str) else None


_PART_TAGS = dict.fromkeys(MEDIA_KINDS, "media") | {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "image",
}


class TextPart(Wire):
    type: str
    text: str


class ImageSource(Wire):
    url: str = Field(min_length=1)
    detail: Literal["auto", "high"] | None = None  # pictures are always read at their full size


Picture = Annotated[ImageSource, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


class ImageUrlPart(Wire):
    type: str
    image_url: Picture


class ImagePart(Wire):
    type: str
    image: Picture


class MediaPart(Wire):
    """Video, audio and files: whoever can read that kind knows its shape."""

    model_config = ConfigDict(extra="allow")
    type: str


Part = Annotated[
    Annotated[TextPart, tag("text")]
    | Annotated[ImageUrlPart, tag("image_url")]
    | Annotated[ImagePart, tag("image")]
    | Annotated[MediaPart, tag("media")],
    choose(_type, f"must be one of: {', '.join(sorted(_PART_TAGS))}", "type"),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Annotated[str, tag("string")] | Annotated[Parts, tag("array")], STRING_OR_ARRAY]


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that add up a stream's deltas leave it in


class PlainMessage(Wire):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1)
    name: str | None = None


class FunctionMessage(Wire):
    role: Literal["function"]
    content: Content
    name: str = Field(min_length=1)


WireMessage = Annotated[
    Annotated[PlainMessage, tag("system")]
    | Annotated[PlainMessage, tag("developer")]
    | Annotated[PlainMessage, tag("user")]
    | Annotated[AssistantMessage, tag("assistant")]
    | Annotated[ToolMessage, tag("tool")]
    | Annotated[FunctionMessage, tag("function")],
    choose(_role, f"must be one of: {', '.join(ROLES)}", "role"),
]
