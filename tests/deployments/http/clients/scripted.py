"""ScriptedBackend: answers the questions of tests/e2e/clients/questions.py from the request alone, without a model."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from deployments.http.generation import TextDelta, ToolCall
from deployments.requests import ChatRequest, Route
from engine.processing.message import Message, image_sources
from tests.deployments.http.conftest import FakeBackend, FakeGeneration, parts_of
from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_TEXT,
    SHAPE,
    TOOL_NAME,
    TWO_CITIES_QUESTION,
    WEATHER_QUESTION,
    WEATHER_THOUGHT,
)

THOUGHTS = {
    CAPITAL_QUESTION: CAPITAL_THOUGHT,
    WEATHER_QUESTION: WEATHER_THOUGHT,
    TWO_CITIES_QUESTION: WEATHER_THOUGHT,
}
OTHER_THOUGHT = "I know the answer."
RESULT_THOUGHT = "I have the weather."
OTHER_ANSWER = "Hello!"
EMMA_JSON = EMMA.model_dump_json()
RAW_TEXT = "and lived happily ever after."

CHARS_PER_TOKEN = 5
CALL_CHARS = 9


class ScriptedBackend(FakeBackend):
    """Answers a conversation with the calls, the JSON or the text that it asks for, after a thought if it asks for one.

    Attributes:
        refusals: Errors of the next starts, one for each.
        failure: Ends every answer after its first two deltas.
    """

    model_name = MODEL

    def __init__(self):
        super().__init__()
        self.refusals: list[Exception] = []
        self.failure: Exception | None = None

    def forget(self) -> None:
        """Return to the state at the beginning; the server keeps its backend from test to test."""
        self.requests.clear()
        self.embeds.clear()
        self.scores.clear()
        self.generations.clear()
        self.refusals.clear()
        self.failure = None

    @property
    def asked(self) -> list[ChatRequest]:
        """The requests that arrived."""
        return [request for request, _ in self.requests]

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        self.start_script = [self.refusals.pop(0)] if self.refusals else []
        deltas = script_of(request)
        self.script = deltas if self.failure is None else [*deltas[:2], self.failure]
        return await super().start(request, route)


def script_of(request: ChatRequest) -> list[TextDelta]:
    """Return the deltas of the answer to a request."""
    if request.raw_prompt is not None:
        return text_script(RAW_TEXT, request)
    thought = thought_script(request)
    if calls := calls_of(request):
        return [*thought, *call_script(calls)]
    return [*thought, *text_script(answer_of(request), request)]


def call_script(calls: Sequence[ToolCall]) -> list[TextDelta]:
    """Return the deltas of calls, each in several parts."""
    parts = [part for call in calls for part in parts_of(call, *range(0, len(call.arguments), CALL_CHARS))]
    return [*(TextDelta("", 2, tool_calls=(part,)) for part in parts), TextDelta("", 1, "tool_calls")]


def thought_script(request: ChatRequest) -> list[TextDelta]:
    if request.thinking is None or request.thinking.mode == "off":
        return []
    thought = RESULT_THOUGHT if results_of(request) else THOUGHTS.get(question_of(request), OTHER_THOUGHT)
    return [TextDelta("", 1, reasoning=piece, num_reasoning_tokens=1) for piece in pieces(thought)]


def text_script(text: str, request: ChatRequest) -> list[TextDelta]:
    """Return the deltas of a text, which ends at a stop string or at max_tokens."""
    stop = next((stop for stop in request.stop if stop in text), None)
    whole = pieces(text if stop is None else text.partition(stop)[0])
    kept = whole[: request.max_tokens]
    deltas = [TextDelta(piece, 1) for piece in kept]
    if len(kept) < len(whole):
        return [*deltas[:-1], replace(deltas[-1], finish_reason="length")]
    return [*deltas[:-1], replace(deltas[-1], finish_reason="stop", stop_sequence=stop)]


def pieces(text: str) -> list[str]:
    """Cut a text into its tokens."""
    return [text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN)]


def calls_of(request: ChatRequest) -> list[ToolCall]:
    """Return the calls that a request asks for: of get_weather for each city, else of a tool with Emma's data."""
    choice = request.tool_choice
    names = choice.names or tuple(tool.name for tool in request.tools)
    if not names or choice.mode == "none" or results_of(request):
        return []
    question = question_of(request)
    cities = re.findall(r"weather in (\w+)", question) if TOOL_NAME in names else []
    if choice.mode == "required" and TOOL_NAME in names:
        cities = cities or ["Paris"]
    if cities:
        cities = cities if request.parallel_tool_calls else cities[:1]
        return [call(TOOL_NAME, json.dumps({"city": city})) for city in cities]
    return [call(name, EMMA_JSON) for name in names if question.startswith(f"Call {name} ")]


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def answer_of(request: ChatRequest) -> str:
    """Return the text of an answer that calls no tool."""
    if list(image_sources(request.messages)):
        return SHAPE
    if results := results_of(request):
        return weather_report(request.messages, results)
    question = question_of(request)
    if request.grammar is not None or PERSON_TEXT in question:
        return EMMA_JSON
    return CAPITAL if question == CAPITAL_QUESTION else OTHER_ANSWER


def weather_report(messages: Sequence[Message], results: Sequence[Message]) -> str:
    """Return the weather by results; a result whose id no call of the conversation has is an error of the server."""
    calls = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls", ())}
    sentences = []
    for result in results:
        city = json.loads(calls[result["tool_call_id"]]["arguments"])["city"]
        weather = json.loads(text_of(result))
        sentences.append(f"It is {weather['condition']} in {city} with {weather['temperature']} degrees.")
    return " ".join(sentences)


def results_of(request: ChatRequest) -> list[Message]:
    """Return the results of tools at the end of the conversation."""
    return list(takewhile(lambda message: message["role"] == "tool", reversed(request.messages)))[::-1]


def question_of(request: ChatRequest) -> str:
    return text_of(next(message for message in reversed(request.messages) if message["role"] == "user"))


def text_of(message: Message) -> str:
    content: Any = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
