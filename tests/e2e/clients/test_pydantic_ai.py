"""pydantic-ai's agents on all three faces."""

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    PERSON_TEXT,
    SHAPE,
    SHAPE_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Person,
    get_weather,
    person_call_question,
)

pytestmark = pytest.mark.server

FACES = pytest.mark.parametrize("face", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def model_of(base_url: str, face: str, name: str = MODEL) -> Model:
    if face == "messages":
        profile: Any = {"supports_json_schema_output": True}
        return AnthropicModel(name, provider=AnthropicProvider(base_url=base_url, api_key="none"), profile=profile)
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    return (OpenAIChatModel if face == "chat" else OpenAIResponsesModel)(name, provider=provider)


def run(agent: Agent[None, Any], prompt: Any, streamed: bool = False, **options: Any) -> Any:
    """The output and all messages."""

    async def run() -> Any:
        async with agent:
            if not streamed:
                result = await agent.run(prompt, **options)
                return result.output, result.all_messages()
            async with agent.run_stream(prompt, **options) as result:
                return await result.get_output(), result.all_messages()

    return asyncio.run(run())


@FACES
@STREAMED
def test_a_question_is_answered(base_url: str, face: str, streamed: bool):
    output, _ = run(Agent(model_of(base_url, face)), CAPITAL_QUESTION, streamed)
    assert output == CAPITAL


@FACES
@STREAMED
def test_tool_is_called_and_its_result_is_used_in_the_answer(base_url: str, face: str, streamed: bool):
    agent = Agent(model_of(base_url, face), tools=[get_weather], instructions="Use the tools when needed.")
    output, messages = run(agent, WEATHER_QUESTION, streamed)
    assert output == WEATHER and len(messages) == 4


@FACES
@pytest.mark.parametrize(
    ("output_type", "question"),
    [
        (ToolOutput(Person), person_call_question("final_result")),
        (NativeOutput(Person), PERSON_QUESTION),
        (PromptedOutput(Person, template="Answer only with JSON that follows this schema: {schema}"), PERSON_TEXT),
    ],
    ids=["tool", "native", "prompted"],
)
def test_an_output_is_an_object_of_the_schema(base_url: str, face: str, output_type: Any, question: str):
    output, _ = run(Agent(model_of(base_url, face), output_type=output_type), question)
    assert output == EMMA


@pytest.mark.parametrize(
    ("face", "settings"),
    [
        ("chat", {"openai_reasoning_effort": "low"}),
        ("responses", {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"}),
        ("messages", {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}),
    ],
)
@STREAMED
def test_a_thought_is_a_part_of_its_own(base_url: str, face: str, settings: Any, streamed: bool):
    output, messages = run(Agent(model_of(base_url, face)), CAPITAL_QUESTION, streamed, model_settings=settings)
    thoughts = [part.content.strip() for part in messages[-1].parts if isinstance(part, ThinkingPart)]
    assert (thoughts, output) == ([CAPITAL_THOUGHT], CAPITAL)


@FACES
def test_an_image_is_seen(base_url: str, face: str, red_circle_png: bytes):
    image = BinaryContent(red_circle_png, media_type="image/png")
    output, _ = run(Agent(model_of(base_url, face)), [SHAPE_QUESTION, image])
    assert SHAPE in output


@FACES
def test_an_unknown_model_is_not_found(base_url: str, face: str):
    with pytest.raises(ModelHTTPError) as caught:
        run(Agent(model_of(base_url, face, "none")), "Hello!")
    assert caught.value.status_code == 404


@FACES
def test_a_bad_field_is_named(base_url: str, face: str):
    with pytest.raises(ModelHTTPError, match="top_p") as caught:
        run(Agent(model_of(base_url, face)), "Hello!", model_settings={"top_p": 5.0})
    assert caught.value.status_code == 400
