"""Runs of pydantic-ai's agents over all three APIs ("faces"): chat completions, responses and messages."""

import asyncio
from typing import TYPE_CHECKING, Any

from tests.e2e.clients.questions import MODEL, PERSON_QUESTION, PERSON_TEXT, Person, person_call_question

if TYPE_CHECKING:
    from pydantic_ai import Agent
    from pydantic_ai.models import Model

PERSON_QUESTIONS = {"tool": person_call_question("final_result"), "native": PERSON_QUESTION, "prompted": PERSON_TEXT}
"""The question for each way to get an object of a schema."""

THINKING: dict[str, dict[str, Any]] = {
    "chat": {"openai_reasoning_effort": "low"},
    "responses": {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"},
    "messages": {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
}
"""The settings of each face that ask for a thought."""


def model_of(base_url: str, face: str, name: str = MODEL) -> "Model":
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if face == "messages":
        profile: Any = {"supports_json_schema_output": True}
        return AnthropicModel(name, provider=AnthropicProvider(base_url=base_url, api_key="none"), profile=profile)
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    return (OpenAIChatModel if face == "chat" else OpenAIResponsesModel)(name, provider=provider)


def person_output(way: str) -> Any:
    """Return the output type that gets a Person by "tool", "native" or "prompted" means."""
    from pydantic_ai import NativeOutput, PromptedOutput, ToolOutput

    if way == "prompted":
        return PromptedOutput(Person, template="Answer only with JSON that follows this schema: {schema}")
    return ToolOutput(Person) if way == "tool" else NativeOutput(Person)


def run(agent: "Agent[None, Any]", prompt: Any, streamed: bool = False, **options: Any) -> tuple[Any, list[Any]]:
    """Return the output and all messages, whichever way they came."""

    async def run() -> Any:
        async with agent:
            if not streamed:
                result = await agent.run(prompt, **options)
                return result.output, result.all_messages()
            async with agent.run_stream(prompt, **options) as result:
                return await result.get_output(), result.all_messages()

    return asyncio.run(run())


def thoughts_of(message: Any) -> list[str]:
    return [part.content.strip() for part in message.parts if part.part_kind == "thinking"]
