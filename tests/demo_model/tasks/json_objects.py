"""Answers in JSON: facts about a person, as an object with the keys that are asked for."""

import json
from dataclasses import dataclass
from typing import Any

from tests.demo_model.tasks.sample import Sample, assistant, system, user
from tests.demo_model.world.draws import Draws, join_list, with_article
from tests.demo_model.world.words import ANIMALS, CITIES, COLORS, FRUITS, JOBS, NAMES, TOWNS

TYPES = {bool: "boolean", int: "integer", list: "array", str: "string"}


@dataclass(frozen=True)
class Field:
    """sentence: says the value in the text."""

    key: str
    value: Any
    sentence: str

    @property
    def type(self) -> str:
        """Return the type's name in JSON schemas."""
        return TYPES[type(self.value)]


def json_object(draws: Draws) -> Sample:
    """Ask for facts of a text as JSON: by keys, by a schema, or by an example with types."""
    fields = _person(draws)
    told = [fields[0], *draws.sample(fields[1:], draws.randint(1, 5))]
    sentences = [field.sentence for field in told]
    draws.shuffle(sentences)
    text = " ".join(sentences)
    wanted = told if draws.chance(0.6) else draws.sample(told, draws.randint(1, len(told)))
    draws.shuffle(wanted)
    answer = assistant(json.dumps({field.key: field.value for field in wanted}))
    instruction = _instruction(draws, wanted)
    if draws.chance(0.5):
        return Sample([system(instruction), user(text), answer], "json")
    content = draws.choice([f"{text}\n\n{instruction}", f"{instruction}\n\n{text}"])
    return Sample([user(content), answer], "json")


def _person(draws: Draws) -> list[Field]:
    name = draws.choice(NAMES) if draws.chance(0.6) else draws.rare(True)
    age = draws.randint(5, 90)
    town = draws.choice(TOWNS + CITIES) if draws.chance(0.7) else draws.rare(True)
    town_key = draws.choice(["city", "town"])
    job, color, animal = draws.choice(JOBS), draws.choice(list(COLORS)), draws.choice(ANIMALS)
    is_married = draws.chance(0.5)
    fruits = draws.sample(FRUITS, draws.randint(1, 3))
    number = draws.randint(1, 999)
    return [
        Field("name", name, f"{name} is here."),
        Field("age", age, f"{name} is {age} years old."),
        Field(town_key, town, f"{name} lives in {town}."),
        Field("job", job, f"{name} works as {with_article(job)}."),
        Field("color", color, f"{name} likes {color}."),
        Field("pet", animal, f"{name} has {with_article(animal)}."),
        Field("married", is_married, f"{name} is {'' if is_married else 'not '}married."),
        Field("fruits", fruits, f"{name} eats {join_list(fruits)}."),
        Field(draws.choice(["id", "number"]), number, f"The number of {name} is {number}."),
    ]


def _instruction(draws: Draws, wanted: list[Field]) -> str:
    types = {field.key: field.type for field in wanted}
    kind = draws.random()
    if kind < 0.4:
        return f"Answer with JSON only. Keys: {', '.join(types)}."
    if kind < 0.75:
        properties = {key: {"type": name} for key, name in types.items()}
        schema = {"type": "object", "properties": properties, "required": list(types)}
        return f"Answer only with JSON that follows this schema: {json.dumps(schema)}"
    return f"Return a JSON object: {json.dumps(types)}"
