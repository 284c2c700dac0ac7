"""Tools that look something up: weather, sums, the web, the time, prices, files and translations."""

import json

from tests.demo_model.world.draws import Draws, capitalize
from tests.demo_model.world.prose import filler
from tests.demo_model.world.tool import (
    Arguments,
    Call,
    Result,
    Tool,
    make_parameter,
    make_schema,
    value_result,
)
from tests.demo_model.world.words import ANIMALS, CITIES, FOODS, TOPICS, TOWNS, WEATHER

LANGUAGES = ["French", "German", "Spanish", "Italian"]
UNIT_WORDINGS = (
    "What is the weather in {0}{1} in {2}?",
    "How is the weather in {0}{1}? Use {2}.",
    "Weather in {0} in {2}",
    "What's the weather like in {0} in {2}?",
    "Tell me the weather in {0} in {2}.",
)
WEATHER_WORDINGS = (
    "What is the weather in {0}{1}?",
    "How is the weather in {0}{1}?",
    "What's the weather like in {0}{1}?",
    "What is the weather like in {0}{1}?",
    "Tell me the weather in {0}.",
    "Is it raining in {0}?",
    "Weather in {0}, please.",
)
"""With {0} for the place, {1} for the time and {2} for the unit."""


def make_weather(draws: Draws, is_described: bool) -> Tool:
    """Return a tool for the weather of a place."""
    choice, units = draws.choice, ["celsius", "fahrenheit"]
    name = choice(["get_weather", "weather", "get_current_weather", "check_weather", "weather_lookup"])
    place = choice(["city", "location", "place", "town"])
    has_unit = draws.chance(0.5)
    unit = choice(["unit", "units"])
    parameters = {place: make_parameter("string", "City name" if is_described else None)}
    if has_unit:
        parameters[unit] = make_parameter("string", values=units)

    def ask() -> Call:
        city = choice(CITIES + TOWNS) if draws.chance(0.5) else draws.rare(True)
        time = choice(["", "", " today", " now", " right now"])
        if has_unit and draws.chance(0.7):
            wanted = choice(units)
            return Call(choice(UNIT_WORDINGS).format(city, time, wanted), {place: city, unit: wanted})
        return Call(choice(WEATHER_WORDINGS).format(city, time), {place: city})

    def run(arguments: Arguments) -> Result:
        degrees, condition = draws.randint(-5, 38), choice(WEATHER)
        answer = f"It is {condition} in {arguments[place]} with {degrees} degrees."
        if draws.chance(0.6):
            return Result(json.dumps({"temperature": degrees, "condition": condition}), answer)
        return Result(f"{condition}, {degrees} degrees", answer)

    descriptions = ["Get the weather for a city", "Returns the current weather", "Weather of a place"]
    return Tool(make_schema(name, choice(descriptions), parameters, [place]), ask, run)


def make_arithmetic(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that adds, subtracts or multiplies."""
    choice = draws.choice
    verb, sign, spoken = choice([("add", "+", "plus"), ("subtract", "-", "minus"), ("multiply", "*", "times")])
    name = choice([verb, verb + "_numbers", "calc_" + verb])
    first, second = choice([("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2")])
    kind = choice(["integer", "number"])

    def ask() -> Call:
        a, b = draws.randint(0, 999), draws.randint(0, 999)
        wordings = [
            f"What is {a} {sign} {b}?",
            f"{capitalize(verb)} {a} and {b}.",
            f"Calculate {a} {spoken} {b}.",
            f"Please {verb} {a} and {b}.",
        ]
        return Call(choice(wordings), {first: a, second: b})

    def run(arguments: Arguments) -> Result:
        a, b = arguments[first], arguments[second]
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        return value_result(draws, value, f"The result is {value}.")

    parameters = {first: make_parameter(kind), second: make_parameter(kind)}
    return Tool(make_schema(name, f"{capitalize(verb)} two numbers", parameters), ask, run)


def make_search(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that searches the web."""
    choice = draws.choice
    name = choice(["search", "web_search", "search_web", "find", "lookup"])
    parameter = choice(["query", "q", "text", "keywords"])

    def ask() -> Call:
        subjects = [
            draws.fill("{adjective} {object}"),
            f"{choice(TOPICS)} in {choice(CITIES)}",
            draws.word() + draws.fill(" {place}"),
            draws.fill("{animal} {topic}"),
            draws.rare() + draws.fill(" {common}"),
            draws.fill("{common} {common} in ") + draws.rare(True),
        ]
        subject = choice(subjects)
        wordings = (
            "Search for {}.",
            "Look up {}.",
            "Find {} on the web.",
            "Please search for {}.",
            "Search the web for {}.",
        )
        return Call(choice(wordings).format(subject), {parameter: subject})

    def run(arguments: Arguments) -> Result:
        found = filler(draws)
        return Result(found, found)

    description = choice(["Search the web", "Search for a text", "Web search"])
    parameters = {parameter: make_parameter("string", "What to search" if is_described else None)}
    return Tool(make_schema(name, description, parameters), ask, run)


def make_time(draws: Draws, is_described: bool) -> Tool:
    """Return a tool for the time in a city."""
    name = draws.choice(["get_time", "current_time", "time_in", "clock"])
    parameter = draws.choice(["city", "zone", "place", "location"])

    def ask() -> Call:
        city = draws.choice(CITIES) if draws.chance(0.5) else draws.rare(True)
        wordings = ("What time is it in {}?", "Tell me the time in {}.", "Current time in {}?")
        return Call(draws.choice(wordings).format(city), {parameter: city})

    def run(arguments: Arguments) -> Result:
        time = draws.clock()
        return Result(draws.choice([time, json.dumps({"time": time})]), f"It is {time} in {arguments[parameter]}.")

    description = draws.choice(["Get the current time", "Time in a city"])
    return Tool(make_schema(name, description, {parameter: make_parameter("string")}), ask, run)


def make_price(draws: Draws, is_described: bool) -> Tool:
    """Return a tool for the price of a thing."""
    name = draws.choice(["get_price", "price_of", "check_price", "stock_price"])
    parameter = draws.choice(["item", "product", "name"])

    def ask() -> Call:
        item = draws.fill("{adjective} {object}")
        wordings = ("How much is the {}?", "What is the price of the {}?", "Price of the {}?")
        return Call(draws.choice(wordings).format(item), {parameter: item})

    def run(arguments: Arguments) -> Result:
        price = draws.randint(1, 999)
        content = draws.choice([str(price), json.dumps({"price": price})])
        return Result(content, f"The {arguments[parameter]} costs {price}.")

    parameters = {parameter: make_parameter("string", "Name of the item" if is_described else None)}
    return Tool(make_schema(name, "Get the price of an item", parameters), ask, run)


def make_file(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that reads a file."""
    name = draws.choice(["read_file", "open_file", "cat", "load_file"])
    parameter = draws.choice(["path", "file", "filename"])

    def ask() -> Call:
        file = f"{draws.word()}.{draws.choice(['txt', 'md', 'py', 'json', 'csv'])}"
        folder = draws.choice(["docs/", "src/", "data/", "notes/"]) if draws.chance(0.5) else ""
        wordings = ("Read the file {}.", "Open {}.", "What is in {}?", "Show me {}")
        return Call(draws.choice(wordings).format(folder + file), {parameter: folder + file})

    def run(arguments: Arguments) -> Result:
        text = filler(draws)
        return Result(text, f"The file says: {text}")

    return Tool(make_schema(name, "Read a file", {parameter: make_parameter("string")}), ask, run)


def make_translation(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that translates a phrase."""
    name = draws.choice(["translate", "translate_text"])
    text, language = draws.choice([("text", "language"), ("text", "target"), ("input", "lang")])

    def ask() -> Call:
        phrases = [draws.choice(FOODS), draws.fill("the {adjective} {object}"), "good morning", draws.choice(ANIMALS)]
        phrase, target = draws.choice(phrases), draws.choice(LANGUAGES)
        wordings = ('Translate "{}" to {}.', 'How do you say "{}" in {}?')
        return Call(draws.choice(wordings).format(phrase, target), {text: phrase, language: target})

    def run(arguments: Arguments) -> Result:
        translation = f"{draws.word()} {draws.word()}"
        return Result(translation, f"In {arguments[language]} it is: {translation}")

    parameters = {text: make_parameter("string"), language: make_parameter("string")}
    return Tool(make_schema(name, "Translate a text", parameters), ask, run)
