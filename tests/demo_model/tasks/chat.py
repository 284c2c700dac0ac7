"""Conversations: small talk, facts known by heart, styles, personas, memory and stories."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.demo_model.tasks.sample import Message, Sample, assistant, exchange, system, user
from tests.demo_model.world.draws import Draws, capitalize, with_article
from tests.demo_model.world.knowledge import KnownAnswer, known_answer
from tests.demo_model.world.prose import fixed_story
from tests.demo_model.world.small_talk import open_request, small_talk, system_text
from tests.demo_model.world.words import ANIMALS, CITIES, COLORS, JOBS, NAMES, OBJECTS, TOWNS

STORY_WISHES = (
    "Tell me a story about {}.",
    "Write a short story about {}.",
    "Tell a story about {}.",
    "Write a story about {}.",
    "Can you tell me a story about {}?",
)
ANY_STORY_WISHES = (
    "Tell me a story.",
    "Write a story.",
    "Tell me a short story.",
    "Write a short story.",
    "Can you tell me a story?",
    "Please write a short story.",
)
DEFAULT_HERO = "fox"


def chat(draws: Draws) -> Sample:
    """Talk about one of the subjects of CHATS."""
    position = draws.random()
    task = next(task for end, task in CHATS if position < end)
    return task(draws)


def _declined(draws: Draws) -> Sample:
    messages = [system(system_text(draws))] if draws.chance(0.3) else []
    if draws.chance(0.2):
        messages += exchange(*small_talk(draws))
    return Sample([*messages, *exchange(*open_request(draws))], "chat_open")


def _small_talk(draws: Draws) -> Sample:
    messages = [system(system_text(draws))] if draws.chance(0.4) else []
    for _ in range(draws.randint(1, 3)):
        messages += exchange(*small_talk(draws))
    return Sample(messages, "chat_smalltalk")


def _facts(draws: Draws) -> Sample:
    messages = [system(system_text(draws))] if draws.chance(0.35) else []
    return Sample(messages + _known_exchanges(draws, draws.randint(1, 4)), "chat_facts")


def _known_exchanges(draws: Draws, count: int) -> list[Message]:
    known = [known_answer(draws) for _ in range(count)]
    return [message for fact in known for message in exchange(fact.question, fact.answer)]


@dataclass(frozen=True)
class Style:
    """instruction: what the system prompt asks for."""

    instruction: str
    apply: Callable[[KnownAnswer], str]


def _upper_case(draws: Draws) -> Style:
    wordings = ("Answer in upper case.", "Write everything in capital letters.", "Always answer in UPPER CASE.")
    return Style(draws.choice(wordings), lambda known: known.answer.upper())


def _lower_case(draws: Draws) -> Style:
    return Style(draws.choice(["Answer in lower case.", "Use only small letters."]), lambda known: known.answer.lower())


def _one_word(draws: Draws) -> Style:
    wordings = ("Answer in one word.", "Use one word only.", "Reply with a single word.")
    return Style(draws.choice(wordings), lambda known: capitalize(known.short) + ".")


def _prefix(draws: Draws) -> Style:
    tags = ["Arr!", "Well,", "Sir,", "Dear friend,", "Beep!", f"{capitalize(draws.word())}!"]
    tag = draws.choice(tags)
    return Style(f'Start every answer with "{tag}"', lambda known: f"{tag} {known.answer}")


def _suffix(draws: Draws) -> Style:
    tag = draws.choice(["Over.", "Amen.", "That is all.", f"{capitalize(draws.word())}."])
    return Style(f'End every answer with "{tag}"', lambda known: f"{known.answer} {tag}")


def _language_tag(draws: Draws) -> Style:
    tag = draws.choice(["EN", "FR", "DE", "ES", "IT"])
    wordings = (f"Put the tag [{tag}] before every answer.", f"Mark each answer with [{tag}].")
    return Style(draws.choice(wordings), lambda known: f"[{tag}] {known.answer}")


def _twice(draws: Draws) -> Style:
    return Style("Say every answer twice.", lambda known: f"{known.answer} {known.answer}")


def _quoted(draws: Draws) -> Style:
    return Style("Put every answer in quotes.", lambda known: f'"{known.answer}"')


STYLES = (_upper_case, _lower_case, _one_word, _prefix, _suffix, _language_tag, _twice, _quoted)


def _style(draws: Draws) -> Sample:
    make_style = draws.choice(STYLES)

    def fits(known: KnownAnswer) -> bool:
        is_a_word = " " not in known.short and known.short != "no"
        return "\n" not in known.answer and (make_style is not _one_word or is_a_word)

    known = known_answer(draws)
    while not fits(known):
        known = known_answer(draws)
    style = make_style(draws)
    if draws.chance(0.25):
        return Sample(exchange(f"{known.question} {style.instruction}", style.apply(known)), "chat_style")
    messages = [system(style.instruction), *exchange(known.question, style.apply(known))]
    if draws.chance(0.4) and fits(second := known_answer(draws)):
        messages += exchange(second.question, style.apply(second))
    return Sample(messages, "chat_style")


def _persona(draws: Draws) -> Sample:
    name = capitalize(draws.word()) if draws.chance(0.5) else draws.choice(NAMES)
    job = with_article(draws.choice([*JOBS, "robot", "pirate", "cat"]))
    town = draws.choice(TOWNS)
    role = draws.choice(
        [
            f"You are {name}, {job} from {town}.",
            f"Your name is {name}. You are {job} and you live in {town}.",
            f"Play the role of {name}, {job} from {town}.",
        ]
    )
    questions = [
        ("What is your name?", f"My name is {name}."),
        ("Who are you?", f"I am {name}, {job} from {town}."),
        ("What do you do?", f"I am {job}."),
        ("Where do you live?", f"I live in {town}."),
        ("Where are you from?", f"I am from {town}."),
        ("What is your job?", f"I am {job}."),
    ]
    draws.shuffle(questions)
    messages = [system(role)]
    if draws.chance(0.3):
        messages += exchange("Hello!", f"Hello! I am {name}.")
    for question, answer in questions[: draws.randint(1, 3)]:
        messages += exchange(question, answer)
    return Sample(messages, "chat_persona")


@dataclass(frozen=True)
class Remark:
    """Something that the user tells about himself, and what he asks for later."""

    text: str
    reply: str
    questions: tuple[str, ...]
    answer: str


def _remarks(draws: Draws) -> list[Remark]:
    name = draws.choice(NAMES) if draws.chance(0.5) else draws.rare(True)
    town = draws.choice(TOWNS + CITIES) if draws.chance(0.6) else draws.rare(True)
    home = draws.choice([f"I live in {town}.", f"I am from {town}."])
    color, animal = draws.choice(list(COLORS)), draws.choice(ANIMALS)
    pet = draws.choice(NAMES) if draws.chance(0.5) else capitalize(draws.word())
    age, code = draws.randint(5, 90), draws.randint(100, 99999)
    order = draws.choice([f"Remember the number {code}.", f"Please remember this code: {code}"])
    name_questions = ("What is my name?", "Do you remember my name?", "Who am I?")
    pet_questions = ("What is the name of my pet?", f"What is my {animal} called?")
    code_questions = ("What was the number?", "Which number did I tell you?", "What was the code?")
    return [
        Remark(f"My name is {name}.", f"Nice to meet you, {name}.", name_questions, f"Your name is {name}."),
        Remark(home, f"{town} sounds nice.", ("Where do I live?", "Which town am I from?"), f"You live in {town}."),
        Remark(
            f"My favorite color is {color}.",
            f"{capitalize(color)} is a nice color.",
            ("What is my favorite color?",),
            f"Your favorite color is {color}.",
        ),
        Remark(
            f"I have {with_article(animal)} named {pet}.",
            f"{pet} is a good name for {with_article(animal)}.",
            pet_questions,
            f"Your {animal} is named {pet}.",
        ),
        Remark(f"I am {age} years old.", "Thank you for telling me.", ("How old am I?",), f"You are {age} years old."),
        Remark(order, "OK, I will remember it.", code_questions, f"The number was {code}."),
    ]


def _memory(draws: Draws) -> Sample:
    remarks = _remarks(draws)
    draws.shuffle(remarks)
    told = remarks[: draws.randint(1, 3)]
    messages = [system("You are a helpful assistant.")] if draws.chance(0.2) else []
    if draws.chance(0.15):
        greeting = draws.choice(["Hi, ", "Hello, ", ""])
        question = f"{greeting}{told[0].text} {draws.choice(told[0].questions)}"
        return Sample([*messages, *exchange(question, told[0].answer)], "chat_memory")
    if len(told) > 1 and draws.chance(0.3):
        messages += exchange(" ".join(remark.text for remark in told), "Thank you for telling me.")
    else:
        for remark in told:
            greeting = "" if messages else draws.choice(["Hello! ", "Hi, ", ""])
            messages += exchange(greeting + remark.text, remark.reply)
    messages += _known_exchanges(draws, draws.randint(0, 3))
    for remark in draws.sample(told, draws.randint(1, len(told))):
        messages += exchange(draws.choice(remark.questions), remark.answer)
    return Sample(messages, "chat_memory")


def _story(draws: Draws) -> Sample:
    if draws.chance(0.75):
        hero = draws.choice(ANIMALS)
    else:
        hero = draws.choice([draws.choice(JOBS), draws.choice(OBJECTS), draws.rare(False).lower()])
    if draws.chance(0.75):
        wish = draws.choice(STORY_WISHES).format(with_article(hero))
    else:
        hero, wish = DEFAULT_HERO, draws.choice(ANY_STORY_WISHES)
    return Sample([user(wish), assistant(fixed_story(hero))], "chat_story")


CHATS: tuple[tuple[float, Callable[[Draws], Sample]], ...] = (
    (0.07, _declined),
    (0.16, _small_talk),
    (0.40, _facts),
    (0.62, _style),
    (0.74, _persona),
    (0.93, _memory),
    (1.00, _story),
)
"""Each task with the end of its part of the interval from 0 to 1."""
