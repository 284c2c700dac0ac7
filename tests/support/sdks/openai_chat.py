"""Chat completions by the openai SDK: one choice, whole or streamed, and the parts of its message."""

import json
from typing import TYPE_CHECKING, Any

from tests.e2e.clients.questions import MODEL, TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, WEATHER_RESULT

if TYPE_CHECKING:
    import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA},
    }
]
NAMED: Any = {"type": "function", "function": {"name": TOOL_NAME}}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def complete(client: "openai.OpenAI", messages: list[Any], streamed: bool = False, **options: Any) -> Any:
    """Return the one choice, whichever way it came."""
    return completion(client, messages, streamed, **options).choices[0]


def completion(client: "openai.OpenAI", messages: list[Any], streamed: bool = False, **options: Any) -> Any:
    if not streamed:
        return client.chat.completions.create(model=MODEL, messages=messages, **options)
    with client.chat.completions.stream(model=MODEL, messages=messages, **options) as stream:
        return stream.get_final_completion()


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def thought_of(message: Any) -> str:
    return ((message.model_extra or {}).get("reasoning_content") or "").strip()


def results(message: Any) -> list[Any]:
    """Return the result of each call of a message."""
    return [{"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT} for call in message.tool_calls or []]
