"""Tool: something that a request offers to the model, with users who ask for it and results that it returns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.demo_model.world.draws import Draws

Arguments = dict[str, Any]
Schema = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A user's text, and the arguments of the call that it asks for."""

    text: str
    arguments: Arguments


@dataclass(frozen=True)
class Result:
    """A tool's result, and the text in which the model then tells it to the user."""

    content: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """schema: as in the `tools` of a chat completion."""

    schema: Schema
    ask: Callable[[], Call]
    run: Callable[[Arguments], Result]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def description(self) -> str:
        return self.schema["function"]["description"]


def make_parameter(kind: str, description: str | None = None, values: Sequence[str] = ()) -> Schema:
    """Return the JSON schema of a parameter; kind is the type's name there."""
    parameter: Schema = {"type": kind}
    if description:
        parameter["description"] = description
    if values:
        parameter["enum"] = list(values)
    return parameter


def make_schema(
    name: str, description: str, parameters: Mapping[str, Schema], required: list[str] | None = None
) -> Schema:
    """Return the schema of a tool; required: names of parameters, by default all."""
    names = list(parameters) if required is None else required
    schema = {"type": "object", "properties": dict(parameters), "required": names}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def acknowledge(draws: Draws, contents: list[str], answer: str) -> Callable[[Arguments], Result]:
    """Return the `run` of a tool that says it is done; answer: a template with {} for each argument."""
    return lambda arguments: Result(draws.choice(contents), answer.format(*arguments.values()))


def value_result(draws: Draws, value: object, answer: str) -> Result:
    """Return a value as it is or in a JSON object."""
    return Result(str(value) if draws.chance(0.6) else json.dumps({"result": value}), answer)
