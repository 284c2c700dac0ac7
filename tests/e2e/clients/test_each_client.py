"""One conversation of each SDK with the model: a tool call, its result and the answer, streamed.

tests/deployments/http/clients runs the SDKs in breadth over a scripted backend, all files beside this one with the
model in the night. The gate has the SDK of each dialect here. The SDKs are imported inside the tests, so that other
processes of tests need not import them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clients.questions import (
    EMMA,
    TOOL_NAME,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
    get_weather,
)
from tests.support.sdks import (
    anthropic_messages,
    instructor_objects,
    langchain_models,
    litellm_completions,
    ollama_chat,
    openai_agents,
    openai_chat,
    openai_responses,
    pydantic_ai_agents,
)

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = [pytest.mark.server, *litellm_completions.OWN_WARNINGS]

like_others = pytest.mark.night("it sends requests of the four dialects; deployments/http/clients runs its features")

CALLS = [(TOOL_NAME, {"city": "Paris"})]
INSTRUCTIONS = "Use the tools when needed."


@pytest.fixture
def event_loop() -> Iterator[None]:
    with litellm_completions.main_loop():
        yield


def test_openai_chat_thinks_calls_a_tool_and_answers(client: "openai.OpenAI"):
    conversation = [openai_chat.user(WEATHER_QUESTION)]
    options: dict[str, Any] = {"tools": openai_chat.TOOLS, "reasoning_effort": "high", "tool_choice": "required"}
    choice = openai_chat.complete(client, conversation, streamed=True, **options)
    assert openai_chat.thought_of(choice.message) == WEATHER_THOUGHT
    assert (openai_chat.calls_of(choice.message), choice.finish_reason) == (CALLS, "tool_calls")
    conversation += [choice.message.to_dict(), *openai_chat.results(choice.message)]
    choice = openai_chat.complete(client, conversation, streamed=True, tools=openai_chat.TOOLS)
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")


def test_openai_responses_thinks_calls_a_tool_and_answers_from_the_stored_response(client: "openai.OpenAI"):
    options: dict[str, Any] = {"tools": openai_responses.TOOLS, "reasoning": {"effort": "low", "summary": "auto"}}
    response = openai_responses.respond(client, streamed=True, input=WEATHER_QUESTION, store=True, **options)
    assert openai_responses.thought_of(response) == WEATHER_THOUGHT
    assert openai_responses.calls_of(response) == CALLS
    results = openai_responses.outputs(response)
    answer = openai_responses.respond(client, streamed=True, input=results, previous_response_id=response.id, **options)
    assert (answer.output_text, answer.status) == (WEATHER, "completed")


def test_anthropic_thinks_calls_a_tool_and_answers(claude: "anthropic.Anthropic"):
    conversation = [anthropic_messages.user(WEATHER_QUESTION)]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    options: dict[str, Any] = {"tools": anthropic_messages.TOOLS, "thinking": thinking}
    message = anthropic_messages.ask(claude, conversation, streamed=True, **options)
    [thought] = anthropic_messages.blocks(message, "thinking")
    assert thought.thinking.strip() == WEATHER_THOUGHT and thought.signature
    assert (anthropic_messages.calls_of(message), message.stop_reason) == (CALLS, "tool_use")
    conversation += [anthropic_messages.said(message), anthropic_messages.results(message)]
    answer = anthropic_messages.ask(claude, conversation, streamed=True, **options)
    assert (anthropic_messages.text_of(answer), answer.stop_reason) == (WEATHER, "end_turn")


def test_ollama_thinks_calls_a_tool_and_answers(base_url: str):
    import ollama

    conversation: list[Any] = [ollama_chat.user(WEATHER_QUESTION)]
    with ollama.Client(host=base_url, timeout=120) as client:
        message = ollama_chat.chat(client, conversation, streamed=True, tools=ollama_chat.TOOLS, think=True).message
        assert message.thinking.strip() == WEATHER_THOUGHT
        assert ollama_chat.calls_of(message) == CALLS
        conversation += [message, *ollama_chat.results(message)]
        answer = ollama_chat.chat(client, conversation, streamed=True, tools=ollama_chat.TOOLS, think=False)
        assert (answer.message.content, answer.done_reason) == (WEATHER, "stop")


@like_others
@pytest.mark.usefixtures("event_loop")
def test_litellm_thinks_calls_a_tool_and_answers(base_url: str):
    conversation = [openai_chat.user(WEATHER_QUESTION)]
    options: dict[str, Any] = {"tools": openai_chat.TOOLS, **litellm_completions.thinking_options("anthropic")}
    message = litellm_completions.complete(base_url, "anthropic", conversation, streamed=True, **options).message
    assert message.reasoning_content.strip() == WEATHER_THOUGHT
    conversation += [message, *openai_chat.results(message)]
    choice = litellm_completions.complete(base_url, "anthropic", conversation, streamed=True, **options)
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")


@like_others
def test_langchain_calls_a_tool_and_answers(base_url: str):
    from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

    tool = langchain_models.weather_tool()
    model = langchain_models.chat_model(base_url, "messages").bind_tools([tool])
    conversation: list[BaseMessage] = [SystemMessage(INSTRUCTIONS), HumanMessage(WEATHER_QUESTION)]
    message = langchain_models.invoke(model, conversation, streamed=True)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
    conversation += [message, *(tool.invoke(call) for call in message.tool_calls)]
    assert langchain_models.invoke(model, conversation, streamed=True).text == WEATHER


@like_others
def test_pydantic_ai_calls_a_tool_and_answers(base_url: str):
    from pydantic_ai import Agent

    model = pydantic_ai_agents.model_of(base_url, "chat")
    agent = Agent(model, tools=[get_weather], instructions=INSTRUCTIONS)
    output, messages = pydantic_ai_agents.run(agent, WEATHER_QUESTION, streamed=True)
    assert output == WEATHER and len(messages) == 4


@like_others
def test_openai_agents_thinks_calls_a_tool_and_answers(base_url: str):
    from agents import ModelSettings
    from openai.types.shared import Reasoning

    settings = ModelSettings(reasoning=Reasoning(effort="low"))
    tools = [openai_agents.weather_tool()]
    result = openai_agents.run(
        base_url, "responses", WEATHER_QUESTION, streamed=True, tools=tools, model_settings=settings
    )
    assert result.final_output == WEATHER and len(result.raw_responses) == 2


@like_others
def test_instructor_streams_an_object_of_the_schema(client: "openai.OpenAI"):
    mode = "JSON_SCHEMA"
    patched = instructor_objects.from_openai(client, mode)
    partials = list(instructor_objects.partial_persons_of(patched, mode))
    assert partials[-1].model_dump() == EMMA.model_dump() and len(partials) > 1
