"""Questions that the demo model answers exactly, and the tool and the schema that clients of all dialects get."""

from typing import Any

from pydantic import BaseModel

MODEL = "demo"

CAPITAL_QUESTION = "What is the capital of France?"
CAPITAL = "The capital of France is Paris."
CAPITAL_THOUGHT = "The user asks: What is the capital of France?"

STORY_QUESTION = "Tell me a story about a fox."

SHAPE_QUESTION = "What is in the image?"
SHAPE = "a red circle"

WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_THOUGHT = "I need get_weather."
WEATHER_RESULT = '{"temperature": 18, "condition": "sunny"}'
WEATHER = "It is sunny in Paris with 18 degrees."

TWO_CITIES_QUESTION = "What is the weather in Paris? And: What is the weather in Oslo?"
TWO_CITIES = ["Paris", "Oslo"]

TOOL_NAME = "get_weather"
TOOL_DESCRIPTION = "Get the weather for a city"
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}

PERSON_TEXT = "Emma is 31 years old. Emma lives in Oslo."
PERSON_QUESTION = f"Answer with JSON only. Keys: name, age, city.\n\n{PERSON_TEXT}"


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


EMMA = Person(name="Emma", age=31, city="Oslo")


def person_call_question(tool: str) -> str:
    """For clients that make a tool of the schema."""
    return f"Call {tool} with name Emma, age 31, city Oslo."


def get_weather(city: str) -> str:
    """Get the weather for a city"""
    return WEATHER_RESULT
