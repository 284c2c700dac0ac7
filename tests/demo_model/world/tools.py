"""Tools that a request can offer, drawn from all kinds, and tools that do not exist."""

import json
from collections.abc import Callable

from tests.demo_model.world.action_tools import make_booking, make_event, make_light, make_message, make_timer
from tests.demo_model.world.draws import Draws, capitalize
from tests.demo_model.world.lookup_tools import (
    make_arithmetic,
    make_file,
    make_price,
    make_search,
    make_time,
    make_translation,
    make_weather,
)
from tests.demo_model.world.tool import (
    Arguments,
    Call,
    Result,
    Tool,
    make_parameter,
    make_schema,
    value_result,
)
from tests.demo_model.world.words import COMMON, DAYS, NAMES, OBJECTS

MADE_UP_VERBS = (
    *("get", "run", "check", "start", "fetch", "show", "make", "update", "delete", "list", "create", "find"),
)


def draw_tool(draws: Draws) -> Tool:
    """Return a tool whose name, parameters and descriptions are drawn."""
    make = draws.choice(TOOLS)
    return make(draws, draws.chance(0.7))


def _made_up(draws: Draws, is_described: bool) -> Tool:
    """A tool that does not exist: its schema must be read."""
    choice = draws.choice
    noun = choice([draws.word(), choice(COMMON), choice(OBJECTS)])
    verb = choice(MADE_UP_VERBS)
    name = choice([f"{verb}_{noun}", f"{verb}_{noun}_{choice(COMMON)}", verb + capitalize(noun)])
    known = ["id", "key", "code", "name", "level", "mode", "count", "owner", "date", "email", "size", "path", "limit"]
    names = draws.sample([*known, choice(COMMON), draws.word()], draws.randint(1, 3))
    kinds = {parameter: choice(["string", "integer", "string", "boolean"]) for parameter in names}
    num_required = draws.randint(1, len(names))
    required, optional = names[:num_required], names[num_required:]

    def ask() -> Call:
        used = required + [parameter for parameter in optional if draws.chance(0.5)]
        arguments = {parameter: _value(draws, kinds[parameter]) for parameter in used}
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        spoken = choice([" and ", ", "]).join(f"{key} {value}" for key, value in shown.items())
        written = ", ".join(f"{key}={value}" for key, value in shown.items())
        wordings = [
            f"{capitalize(verb)} {noun} with {spoken}.",
            f"Please {verb} the {noun} with {spoken}.",
            f"Use {name} with {spoken}.",
            f"Call {name} with {spoken}.",
            f"Call {name}({written})",
            f"{capitalize(verb)} the {noun}: {written}",
        ]
        return Call(choice(wordings), arguments)

    def run(arguments: Arguments) -> Result:
        value = choice([draws.word(), str(draws.randint(1, 999)), draws.code()])
        return value_result(draws, value, f"The result is {value}.")

    action = f"{capitalize(verb)} the {noun}"
    description = choice([f"{capitalize(verb)} {noun}", f"{capitalize(verb)}s the {noun}", f"{action} for a user"])
    parameters = {
        parameter: make_parameter(kinds[parameter], choice(["The ", ""]) + parameter if is_described else None)
        for parameter in names
    }
    return Tool(make_schema(name, description, parameters, required), ask, run)


def _value(draws: Draws, kind: str) -> str | int | bool:
    if kind == "integer":
        return draws.randint(1, 99999)
    if kind == "boolean":
        return draws.chance(0.5)
    return draws.choice([draws.rare(), draws.code(), draws.choice(NAMES), draws.choice(DAYS)])


TOOLS: tuple[Callable[[Draws, bool], Tool], ...] = (
    *(make_weather, make_arithmetic, make_search, make_message, make_timer, make_time, make_light, make_price),
    *(make_event, make_file, make_translation, make_booking),
    *(_made_up, _made_up, _made_up),
)
"""Each is equally likely. The second argument: whether parameters are described."""
