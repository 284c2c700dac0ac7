"""Chats by the ollama SDK, whole or streamed, and the parts of their message."""

from typing import TYPE_CHECKING, Any

from tests.e2e.clients.questions import MODEL, TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, WEATHER_RESULT

if TYPE_CHECKING:
    import ollama

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA},
    }
]
GREEDY = {"temperature": 0}


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def chat(client: "ollama.Client", messages: list[Any], streamed: bool = False, **fields: Any) -> Any:
    """Return the last response, with the message of all, whichever way it came."""
    fields = {"model": MODEL, "options": GREEDY, **fields}
    if not streamed:
        return client.chat(messages=messages, stream=False, **fields)
    *parts, last = client.chat(messages=messages, stream=True, **fields)
    assert not any(part.done for part in parts) and not last.message.content
    message = last.message
    message.content = "".join(part.message.content or "" for part in parts)
    message.thinking = "".join(part.message.thinking or "" for part in parts) or None
    message.tool_calls = [call for part in parts for call in part.message.tool_calls or ()] or None
    return last


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, dict(call.function.arguments)) for call in message.tool_calls or ()]


def results(message: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": WEATHER_RESULT, "tool_name": call.function.name} for call in message.tool_calls]
