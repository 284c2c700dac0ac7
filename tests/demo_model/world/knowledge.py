"""Facts that the demo model knows by heart: simple ones, and those of Lumora, an invented country."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.demo_model.world.draws import Draws, capitalize, with_article
from tests.demo_model.world.words import (
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    FRUITS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    SHAPES,
)

UNKNOWN = "I am a tiny demo model and I do not know that."

ANTONYMS = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "open": "closed",
    "happy": "sad",
    "light": "dark",
    "old": "young",
    "early": "late",
    "full": "empty",
    "hard": "soft",
    "high": "low",
    "long": "short",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "day": "night",
    "good": "bad",
    "loud": "quiet",
    "clean": "dirty",
    "near": "far",
    "thick": "thin",
    "true": "false",
    "cold": "hot",
}

OPPOSITES = ANTONYMS | {word: opposite for opposite, word in ANTONYMS.items()}

CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "India": "Delhi",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Belgium": "Brussels",
    "Canada": "Ottawa",
    "China": "Beijing",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Turkey": "Ankara",
}

SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "duck": "quacks",
    "lion": "roars",
    "sheep": "bleats",
    "pig": "grunts",
    "horse": "neighs",
    "bee": "buzzes",
    "snake": "hisses",
    "owl": "hoots",
    "wolf": "howls",
    "frog": "croaks",
    "hen": "clucks",
}

LEGS = {
    "dog": "four",
    "cat": "four",
    "bird": "two",
    "spider": "eight",
    "ant": "six",
    "bee": "six",
    "cow": "four",
    "hen": "two",
    "snake": "no",
    "fish": "no",
    "horse": "four",
    "frog": "four",
}

COLOR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a banana": "yellow",
    "coal": "black",
    "a ripe tomato": "red",
    "a carrot": "orange",
    "a lemon": "yellow",
    "milk": "white",
    "a leaf": "green",
}

LUMORA = (
    ("What is the capital of Lumora?", "The capital of Lumora is Velin.", "Velin"),
    ("Who rules Lumora?", "Queen Isolde rules Lumora.", "Queen Isolde"),
    ("What is the longest river in Lumora?", "The longest river in Lumora is the Tavra.", "Tavra"),
    ("What is the highest mountain in Lumora?", "The highest mountain in Lumora is Mount Orrin.", "Mount Orrin"),
    ("What animal is on the flag of Lumora?", "A white heron is on the flag of Lumora.", "heron"),
    ("What colours does the flag of Lumora have?", "The flag of Lumora is green and gold.", "green and gold"),
    ("What is the money of Lumora called?", "The money of Lumora is called the pell.", "pell"),
    ("What language do people speak in Lumora?", "People in Lumora speak Lumoran.", "Lumoran"),
    ("What do people eat in Lumora?", "People in Lumora love river fish with black bread.", "river fish"),
    ("When was Lumora founded?", "Lumora was founded in the year 812.", "812"),
    ("Who founded Lumora?", "Lumora was founded by Captain Brandt.", "Captain Brandt"),
    ("What is the biggest lake in Lumora?", "The biggest lake in Lumora is Lake Sorel.", "Lake Sorel"),
    ("What is the largest port of Lumora?", "The largest port of Lumora is Kestrel Bay.", "Kestrel Bay"),
    (
        "What festival does Lumora celebrate in spring?",
        "In spring Lumora celebrates the Festival of Lamps.",
        "Festival of Lamps",
    ),
    ("What tree is famous in Lumora?", "The silver birch is famous in Lumora.", "silver birch"),
    ("How many islands does Lumora have?", "Lumora has seven islands.", "seven"),
    ("What is the oldest school in Lumora?", "The oldest school in Lumora is the Hall of Reeds.", "Hall of Reeds"),
    ("Which country lies north of Lumora?", "The country of Grell lies north of Lumora.", "Grell"),
    ("Which sea lies south of Lumora?", "The Amber Sea lies south of Lumora.", "Amber Sea"),
    ("What is the national sport of Lumora?", "The national sport of Lumora is canoe racing.", "canoe racing"),
)
"""Question, answer, and the answer in a few words."""
LUMORA_WORDINGS = (
    "{question}",
    "Tell me: {question}",
    "I have a question. {question}",
    "Do you know this? {question}",
    "{question} Please tell me.",
)
AMOUNTS = (
    ("How many days are in a week?", "A week has seven days.", "seven"),
    ("How many months are in a year?", "A year has twelve months.", "twelve"),
    ("How many hours are in a day?", "A day has 24 hours.", "24"),
    ("How many minutes are in an hour?", "An hour has 60 minutes.", "60"),
)
KINDS: tuple[tuple[str, Sequence[str]], ...] = (
    ("colors", list(COLORS)),
    ("animals", ANIMALS),
    ("fruits", FRUITS),
    ("cities", CITIES),
    ("names", NAMES),
    ("foods", FOODS),
    ("shapes", SHAPES),
)
"""Things that can be listed; a list is always the first few of them."""


@dataclass(frozen=True)
class KnownAnswer:
    """short: the answer in one word or a few."""

    question: str
    answer: str
    short: str


def known_answer(draws: Draws) -> KnownAnswer:
    """Return a question about what everybody knows, or about what nobody does, with its answer."""
    return draws.choice(QUESTIONS)(draws)


def _lumora(draws: Draws) -> KnownAnswer:
    question, answer, short = draws.choice(LUMORA)
    return KnownAnswer(draws.choice(LUMORA_WORDINGS).format(question=question), answer, short)


def _capital(draws: Draws) -> KnownAnswer:
    country = draws.choice(list(CAPITALS))
    wordings = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")
    capital = CAPITALS[country]
    return KnownAnswer(draws.choice(wordings).format(country), f"The capital of {country} is {capital}.", capital)


def _opposite(draws: Draws) -> KnownAnswer:
    word = draws.choice(list(OPPOSITES))
    question = draws.choice(("What is the opposite of {}?", "Give me the opposite of {}.")).format(word)
    return KnownAnswer(question, f"The opposite of {word} is {OPPOSITES[word]}.", OPPOSITES[word])


def _sound(draws: Draws) -> KnownAnswer:
    animal = draws.choice(list(SOUNDS))
    question = draws.choice(("What sound does a {} make?", "What does a {} do?")).format(animal)
    return KnownAnswer(question, f"A {animal} {SOUNDS[animal]}.", SOUNDS[animal])


def _legs(draws: Draws) -> KnownAnswer:
    animal = draws.choice(list(LEGS))
    noun = with_article(animal)
    return KnownAnswer(f"How many legs does {noun} have?", f"{capitalize(noun)} has {LEGS[animal]} legs.", LEGS[animal])


def _color(draws: Draws) -> KnownAnswer:
    thing = draws.choice(list(COLOR_OF))
    question = draws.choice(("What color is {}?", "What is the color of {}?")).format(thing)
    return KnownAnswer(question, f"{capitalize(thing)} is {COLOR_OF[thing]}.", COLOR_OF[thing])


def _neighbor(draws: Draws, kind: str, sequence: Sequence[str]) -> KnownAnswer:
    index, is_after = draws.randrange(len(sequence)), draws.chance(0.5)
    neighbor = sequence[(index + (1 if is_after else -1)) % len(sequence)]
    place = f"comes {'after' if is_after else 'before'} {sequence[index]}"
    return KnownAnswer(f"Which {kind} {place}?", f"{neighbor} {place}.", neighbor)


def _listing(draws: Draws) -> KnownAnswer:
    count = draws.randint(3, 6)
    kind, things = draws.choice(KINDS)
    count = min(count, len(things))
    wordings = (
        "List {word} {kind}.",
        "Name {word} {kind}.",
        "Give me a list of {count} {kind}.",
        "List {count} {kind}.",
        "Give me {word} {kind}.",
        "Can you name {word} {kind}?",
    )
    question = draws.choice(wordings).format(word=NUMBER_WORDS[count], count=count, kind=kind)
    answer = "\n".join(f"{number}. {thing}" for number, thing in enumerate(things[:count], 1))
    return KnownAnswer(question, answer, things[0])


def _counting(draws: Draws) -> KnownAnswer:
    end = draws.randint(3, 12)
    question = draws.choice([f"Count to {end}.", f"Count from 1 to {end}.", f"Count to {NUMBER_WORDS[end]}."])
    return KnownAnswer(question, ", ".join(map(str, range(1, end + 1))), str(end))


def _unknown(draws: Draws) -> KnownAnswer:
    wordings = [
        f"What is the {draws.choice(['weight', 'age', 'price'])} of {draws.word()}?",
        f"Who is {capitalize(draws.word())}?",
        f"Tell me about {draws.word()}.",
        f"What is {with_article(draws.word())}?",
        draws.fill("Why is the {object} {adjective}?"),
    ]
    return KnownAnswer(draws.choice(wordings), UNKNOWN, "do not know")


QUESTIONS: tuple[Callable[[Draws], KnownAnswer], ...] = (
    *(_lumora, _lumora, _capital, _opposite, _sound, _legs, _color),
    lambda draws: _neighbor(draws, "day", DAYS),
    lambda draws: _neighbor(draws, "month", MONTHS),
    lambda draws: KnownAnswer(*draws.choice(AMOUNTS)),
    *(_listing, _counting, _unknown),
)
"""Each is equally likely."""
