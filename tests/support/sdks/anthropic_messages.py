"""Messages by the anthropic SDK, whole or streamed, and their blocks."""

from typing import TYPE_CHECKING, Any

from tests.e2e.clients.questions import MODEL, TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, WEATHER_RESULT

if TYPE_CHECKING:
    import anthropic

TOOLS: Any = [{"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": TOOL_SCHEMA}]


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def ask(claude: "anthropic.Anthropic", messages: list[Any], streamed: bool = False, **options: Any) -> Any:
    """Return the message, whichever way it came."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": messages, **options}
    if not streamed:
        return claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        return stream.get_final_message()


def blocks(message: Any, kind: str) -> list[Any]:
    return [block for block in message.content if block.type == kind]


def text_of(message: Any) -> str:
    return "".join(block.text for block in blocks(message, "text"))


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in blocks(message, "tool_use")]


def said(message: Any) -> Any:
    return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


def results(message: Any) -> Any:
    """Return the results of all calls of a message, in one message, as Anthropic wants them."""
    return user(
        [
            {"type": "tool_result", "tool_use_id": block.id, "content": WEATHER_RESULT}
            for block in blocks(message, "tool_use")
        ]
    )
