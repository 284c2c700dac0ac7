"""Runs of openai-agents over both of OpenAI's APIs ("faces"): chat completions and responses."""

import asyncio
from typing import Any

from tests.e2e.clients import questions
from tests.e2e.clients.questions import MODEL


def weather_tool() -> Any:
    from agents import function_tool

    return function_tool(questions.get_weather)


def run(base_url: str, face: str, prompt: Any, streamed: bool = False, model: str = MODEL, **agent: Any) -> Any:
    """Return the result of a run, whichever way it came."""
    import openai
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner

    model_class = OpenAIChatCompletionsModel if face == "chat" else OpenAIResponsesModel

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
            pico = Agent(name="Pico", model=model_class(model, client), **agent)
            if not streamed:
                return await Runner.run(pico, prompt)
            result = Runner.run_streamed(pico, prompt)
            async for _ in result.stream_events():
                pass
            return result

    return asyncio.run(run())
