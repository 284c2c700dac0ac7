"""The wire models of Anthropic's messages and their content blocks.

Unknown keys of a block are dropped, `cache_control` among them: the prefix cache needs no hints.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.http.wire import STRING_OR_ARRAY, OpenWire, choose, tag

MAX_BLOCKS = 2048
"""Content blocks of one message, or of one tool result."""


class TextBlock(OpenWire):
    """A block of text."""

    type: Literal["text"]
    text: str


class Base64Source(OpenWire):
    """The bytes of an image in base64."""

    type: Literal["base64"]
    media_type: str = Field(pattern=r"^image/[a-zA-Z0-9.+-]{1,64}$")
    data: str = Field(min_length=1)


class UrlSource(OpenWire):
    """The URL of an image."""

    type: Literal["url"]
    url: str = Field(min_length=1)


def _type(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def _one_of(*kinds: str, advice: str = "") -> Any:
    """Return a union's discriminator by `type`. A value that is no object goes to the first model, which refuses it."""
    allowed = " or ".join(", ".join(repr(kind) for kind in kinds).rsplit(", ", 1))
    return choose(
        lambda value: _type(value) if isinstance(value, dict) else kinds[0],
        f"Input should be {allowed}{advice}",
        "type",
    )


class ImageBlock(OpenWire):
    """An image of a user message or a tool result."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, tag("base64")] | Annotated[UrlSource, tag("url")], _one_of("base64", "url")
    ]


class TextSource(OpenWire):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(OpenWire):
    """The text of a document, as one string or as blocks."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, tag("string")]
        | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), tag("array")],
        STRING_OR_ARRAY,
    ]

    @property
    def data(self) -> str:
        return self.content if isinstance(self.content, str) else "\n\n".join(block.text for block in self.content)


class DocumentBlock(OpenWire):
    """A document in plain text; `citations` have no effect."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, tag("text")] | Annotated[ContentSource, tag("content")],
        _one_of("text", "content", advice="; PDF and other files are not read: send their text"),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n\n".join(part for part in (self.title, self.context, self.source.data) if part)


class ToolReference(OpenWire):
    """A placeholder for the definition of a deferred tool."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[ToolReference, tag("tool_reference")],
    _one_of("text", "image", "document", "tool_reference"),
]


def _content(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else None


STRING_OR_BLOCKS = choose(_content, "Input should be a string or a list of blocks")


class ToolResult(OpenWire):
    """The result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: (
        Annotated[
            Annotated[str, tag("string")]
            | Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), tag("array")],
            STRING_OR_BLOCKS,
        ]
        | None
    ) = None
    is_error: bool | None = None


class ThinkingBlock(OpenWire):
    """A thought of an earlier answer. If `thinking` is empty, the text comes from the signature of this server."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(OpenWire):
    """An encrypted thought of Anthropic's servers; it is dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(OpenWire):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ServerToolBlock(OpenWire):
    """A call or result of a tool of Anthropic's servers, as of a session that began there; it is left out."""

    type: str


SERVER_TOOL_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "advisor_tool_result", "compaction", "fallback"),
)
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")


def _assistant_block(block: Any) -> str | None:
    kind = _type(block) if isinstance(block, dict) else "text"
    return "server_tool" if kind in SERVER_TOOL_BLOCKS else kind


class NamedTool(OpenWire):
    """The name of a tool in `tools`."""

    type: Literal["tool_reference"] | None = None
    name: str


class ToolChange(OpenWire):
    """Tells the model in the middle of a conversation that a deferred tool can be called, or no longer."""

    type: Literal["tool_addition", "tool_removal"]
    tool: NamedTool


UserBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[ToolResult, tag("tool_result")],
    _one_of("text", "image", "document", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[RedactedThinking, tag("redacted_thinking")]
    | Annotated[ToolUse, tag("tool_use")]
    | Annotated[ServerToolBlock, tag("server_tool")],
    choose(
        _assistant_block,
        f"Input should be {', '.join(map(repr, _ASSISTANT_BLOCKS[:-1]))} or {_ASSISTANT_BLOCKS[-1]!r}",
        "type",
    ),
]
SystemBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ToolChange, tag("tool_addition")]
    | Annotated[ToolChange, tag("tool_removal")],
    _one_of("text", "tool_addition", "tool_removal"),
]
TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]
Texts = Annotated[Annotated[str, tag("string")] | Annotated[TextBlocks, tag("array")], STRING_OR_BLOCKS]
"""A system prompt."""


class UserMessage(OpenWire):
    """A message of the user, tool results included."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, tag("string")]
        | Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), tag("array")],
        STRING_OR_BLOCKS,
    ]


class AssistantMessage(OpenWire):
    """An earlier answer of the model. If it is the last message, the answer continues its text."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, tag("string")]
        | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), tag("array")],
        STRING_OR_BLOCKS,
    ]


class SystemMessage(OpenWire):
    """A late system message; Claude Code sends them after user messages and tool results."""

    role: Literal["system"]
    content: Annotated[
        Annotated[str, tag("string")]
        | Annotated[list[SystemBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), tag("array")],
        STRING_OR_BLOCKS,
    ]


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else "user"
    return role if isinstance(role, str) else None


WireMessage = Annotated[
    Annotated[UserMessage, tag("user")]
    | Annotated[AssistantMessage, tag("assistant")]
    | Annotated[SystemMessage, tag("system")],
    choose(_role, "Input should be 'user', 'assistant' or 'system'", "role"),
]
