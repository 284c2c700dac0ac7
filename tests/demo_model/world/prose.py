"""Sentences that mean nothing, and stories."""

from tests.demo_model.world.draws import Draws, capitalize, with_article
from tests.demo_model.world.words import ADJECTIVES, ANIMALS, NAMES, OBJECTS, PLACES, TOWNS

FILLERS = (
    "The {adjective} {job} {verb} the {object} near the {place}",
    "{name} {verb} a {adjective} {object} {time}",
    "It was {weather} in {town} and the {place} was {adjective}",
    "The {animal} slept under the {adjective} {place} {time}",
    "Many people in {town} like {food} with {fruit} {time}",
    "A {job} and a {job} talked {adverb} about {topic}",
    "{time}, {name} walked {adverb} to the {place}",
    "There were {count} {animal}s and a {adjective} {object} behind the {place}",
    "The road from {town} to {town} is {adjective} and {adjective}",
    "Nobody knew why the {adjective} {place} was so {adjective}",
    "{name} and {name} {verb} the {adjective} {object} {adverb}",
    "On {day} the {job} {verb} {number} {object}s at the {place}",
    "The wind blew {adverb} over the {place} and the {place}",
    "In {month}, the {adjective} {animal} came back to {town}",
)


OPENING = "Once upon a time, {a_hero} named {hero_name} lived near the {home} of {home_town}."
PLOT = (
    (
        "{hero_name} was {mood} and liked to look for {a_thing}.",
        "Every day {hero_name} walked to the {home} and looked for {a_thing}.",
        "{hero_name} wanted to find {a_thing} more than anything.",
    ),
    (
        "One {weather} day, {hero_name} met {a_friend} named {friend_name}.",
        "Then {a_friend} named {friend_name} came along the road.",
        "At the {home}, {hero_name} saw {a_friend} named {friend_name}.",
    ),
    (
        '"Can you help me?" asked {hero_name}.',
        '"Hello, {friend_name}," said {hero_name}.',
        '"I am looking for {a_thing}," said {hero_name}.',
    ),
    (
        '"Of course," said {friend_name}. "Let us look together."',
        '{friend_name} smiled and said, "Follow me."',
        '"I know where it is," said {friend_name}.',
    ),
    (
        "They looked behind the {place} and under the {place}.",
        "They walked all day until they reached the {place}.",
        "They crossed a {adjective} bridge and a {adjective} forest.",
    ),
    ("At last they found the {thing} in the {place}.", "There, in the {place}, was the {thing}."),
    (
        "{hero_name} was very happy and thanked {friend_name}.",
        "{hero_name} shared {food} and {fruit} with {friend_name}.",
    ),
    (
        "From that day on, {hero_name} and {friend_name} were good friends.",
        "They went home and slept well that night.",
        "And so the {hero} and the {friend} became friends.",
    ),
)
"""The sentences behind the opening, in their order, and the alternatives for each."""


def filler(draws: Draws) -> str:
    """Return a sentence between which facts are hidden."""
    sentence = capitalize(draws.fill(draws.choice(FILLERS)))
    return sentence + (draws.choice([".", ".", ".", "!"]) if draws.chance(0.97) else draws.fill(", said the {job}."))


def fixed_story(hero: str) -> str:
    """Return the one story about this hero, so that greedy decoding tells a coherent one.

    Heroes that are no animals share one plot.
    """
    return story(Draws("story " + (hero if hero in ANIMALS else "any")), hero)


def story(draws: Draws, hero: str | None = None) -> str:
    """Return nine sentences about an animal that looks for something and finds it with a friend."""
    choice = draws.choice
    hero = hero or choice(ANIMALS)
    words = {"hero": hero, "hero_name": choice(NAMES), "home": choice(PLACES), "thing": choice(OBJECTS)}
    words["home_town"] = choice(TOWNS)
    choice(
        ["friend", "helper", "neighbor"]
    )  # told no longer, but the model knows the stories that come after this draw
    words["friend"] = choice([animal for animal in ANIMALS if animal != hero])
    words["mood"] = choice(ADJECTIVES[20:40])
    words["friend_name"] = choice([name for name in NAMES if name != words["hero_name"]])
    words |= {f"a_{noun}": with_article(words[noun]) for noun in ("hero", "thing", "friend")}
    sentences = [choice([draws.fill(sentence, **words) for sentence in alternatives]) for alternatives in PLOT]
    return " ".join([draws.fill(OPENING, **words), *sentences])


def plain_text(draws: Draws) -> str:
    """Return a text without a chat around it: stories, or sentences that mean nothing."""
    if draws.chance(0.6):
        return " ".join(story(draws) for _ in range(draws.randint(1, 2)))
    return " ".join(filler(draws) for _ in range(draws.randint(4, 16)))
