"""Responses by the openai SDK, whole or streamed, and their items."""

import json
from typing import TYPE_CHECKING, Any

from tests.e2e.clients.questions import MODEL, TOOL_DESCRIPTION, TOOL_NAME, TOOL_SCHEMA, WEATHER_RESULT

if TYPE_CHECKING:
    import openai

TOOLS: Any = [
    {
        "type": "function",
        "name": TOOL_NAME,
        "description": TOOL_DESCRIPTION,
        "parameters": TOOL_SCHEMA,
        "strict": False,
    }
]


def respond(client: "openai.OpenAI", streamed: bool = False, **fields: Any) -> Any:
    """Return the response, whichever way it came."""
    if not streamed:
        return client.responses.create(model=MODEL, **fields)
    with client.responses.stream(model=MODEL, **fields) as stream:
        return stream.get_final_response()


def items(response: Any, kind: str) -> list[Any]:
    return [item for item in response.output if item.type == kind]


def calls_of(response: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in items(response, "function_call")]


def outputs(response: Any) -> list[Any]:
    """Return the result of each call of a response."""
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
        for call in items(response, "function_call")
    ]


def history(question: str, response: Any) -> list[Any]:
    """Return the input of the next request: the question, the items of the response and the results of its calls."""
    said = [item.to_dict() for item in response.output]
    return [{"role": "user", "content": question}, *said, *outputs(response)]


def thought_of(response: Any) -> str:
    [item] = items(response, "reasoning")
    return "".join(part.text for part in [*(item.content or []), *item.summary]).strip()
