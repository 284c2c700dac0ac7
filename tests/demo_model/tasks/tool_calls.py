"""Conversations in which tools are offered: no call, one call, two calls, and the answer from their results."""

from typing import Any

from tests.demo_model.tasks.sample import Message, Sample, assistant, exchange, system, user
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.knowledge import known_answer
from tests.demo_model.world.small_talk import small_talk, system_text
from tests.demo_model.world.tool import Arguments, Tool
from tests.demo_model.world.tools import draw_tool
from tests.demo_model.world.words import (
    ADJECTIVES,
    CITIES,
    COMMON,
    DAYS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACES,
    TOPICS,
    TOWNS,
)

KNOWN_WORDS = {
    *(*CITIES, *TOWNS, *NAMES, *DAYS, *OBJECTS, *PLACES, *ADJECTIVES, *COMMON, *TOPICS, *FOODS),
    *("celsius", "fahrenheit", "on", "off"),
}


def tool_calls(draws: Draws) -> Sample:
    """Offer one to four tools; one request in ten needs none of them."""
    tools = _tools(draws)
    position = draws.random()
    messages = []
    if draws.chance(0.35):
        prompts = [system_text(draws), "Use the tools when needed.", "You are helpful. Use tools."]
        messages.append(system(draws.choice(prompts)))
    if position < 0.10:
        return _without_call(draws, messages, tools)
    thinking = draws.chance(0.15)
    if position < 0.24:
        return _two_calls(draws, messages, tools, thinking)
    return _one_call(draws, messages, tools, thinking)


def rare_tool_calls(draws: Draws) -> Sample:
    """Offer tools; most of the calls have a rare string among their arguments."""
    for _ in range(5):
        sample = tool_calls(draws)
        if sample.task != "tool_call" or draws.chance(0.35) or _has_rare_argument(sample):
            return sample
    return tool_calls(draws)


def _has_rare_argument(sample: Sample) -> bool:
    calls = [call["function"] for call in sample.messages[-1]["tool_calls"]]
    values = [value for call in calls for value in call["arguments"].values() if isinstance(value, str)]
    return any(value not in KNOWN_WORDS and not KNOWN_WORDS.issuperset(value.split()) for value in values)


def _tools(draws: Draws) -> list[Tool]:
    count, tools = draws.choice([1, 1, 2, 2, 3, 4]), []
    while len(tools) < count:
        tool = draw_tool(draws)
        if all(tool.name != other.name and tool.description != other.description for other in tools):
            tools.append(tool)
    return tools


def _without_call(draws: Draws, messages: list[Message], tools: list[Tool]) -> Sample:
    if draws.chance(0.5):
        question, answer = small_talk(draws)
    else:
        known = known_answer(draws)
        question, answer = known.question, known.answer
    return _sample([*messages, *exchange(question, answer)], "tool_none", tools)


def _two_calls(draws: Draws, messages: list[Message], tools: list[Tool], thinking: bool) -> Sample:
    first = draws.choice(tools)
    one = first.ask()
    second = first if draws.chance(0.6) or len(tools) == 1 else draws.choice(tools)
    other = second.ask()
    question = one.text.rstrip(".?!") + draws.choice([" and then: ", ". Also: ", ". And: "]) + other.text
    thought = f"I need {first.name} and {second.name}." if thinking else None
    calls = [(first, one.arguments), (second, other.arguments)]
    messages = [*messages, user(question), _calling(calls, thought)]
    if thinking or not draws.chance(0.5):
        return _sample(messages, "tool_parallel", tools)
    results = [tool.run(arguments) for tool, arguments in calls]
    messages += [{"role": "tool", "content": result.content} for result in results]
    answer = " ".join(result.answer for result in results)
    return _sample([*messages, assistant(answer)], "tool_final", tools)


def _one_call(draws: Draws, messages: list[Message], tools: list[Tool], thinking: bool) -> Sample:
    tool = draws.choice(tools)
    call = tool.ask()
    if draws.chance(0.12):
        messages = [*messages, *exchange("Hello!", "Hello! How can I help you?")]
    thought = f"I need {tool.name}." if thinking else None
    messages = [*messages, user(call.text), _calling([(tool, call.arguments)], thought)]
    if thinking or draws.chance(0.5):
        return _sample(messages, "tool_call", tools)
    result = tool.run(call.arguments)
    messages += [{"role": "tool", "content": result.content}, assistant(result.answer)]
    if draws.chance(0.3):
        tool = draws.choice(tools)
        call = tool.ask()
        messages += [user(call.text), _calling([(tool, call.arguments)], None)]
        return _sample(messages, "tool_call", tools)
    return _sample(messages, "tool_final", tools)


def _calling(calls: list[tuple[Tool, Arguments]], thought: str | None) -> Message:
    functions: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": tool.name, "arguments": arguments}} for tool, arguments in calls
    ]
    return {**assistant("", thought), "tool_calls": functions}


def _sample(messages: list[Message], task: str, tools: list[Tool]) -> Sample:
    return Sample(messages, task, tools=[tool.schema for tool in tools])
