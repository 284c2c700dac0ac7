"""Small talk, system prompts that change nothing, and requests that the demo model declines."""

from tests.demo_model.world.draws import Draws, with_article
from tests.demo_model.world.knowledge import UNKNOWN
from tests.demo_model.world.prose import filler
from tests.demo_model.world.words import COMMON, DAYS, FOODS, NAMES, OBJECTS, PLACES, TOPICS, TOWNS

SELF = "I am Pico, a tiny demo model."
HELP = "I can chat, look at simple pictures, find facts in long texts, do small sums and call tools."
CANNOT = "I am a tiny demo model and I cannot do that."
POEM = (
    "The sun goes up, the sun goes down,\n"
    "The moon shines over the quiet town,\n"
    "The fox and the owl both say good night,\n"
    "And stars fill the sky with a gentle light."
)

SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "Hello there.", "Good morning!", "Good evening!"),
        ("Hello! How can I help you?",),
    ),
    (("How are you?", "How are you today?", "How do you do?"), ("I am fine, thank you. How can I help you?",)),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a robot?"), (SELF,)),
    (("What can you do?", "How can you help me?", "Help", "What are you good at?"), (HELP,)),
    (("Thank you!", "Thanks", "Thanks a lot!", "Thank you very much."), ("You are welcome!",)),
    (("Goodbye", "Bye!", "See you later.", "Good night!"), ("Goodbye! Have a nice day.",)),
    (("Are you there?", "Ping", "Test", "This is a test."), ("Yes, I am here.",)),
    (("Who made you?", "Who built you?"), ("I was trained from scratch on made-up data.",)),
    (("OK", "Great!", "Nice!", "Cool."), ("Good. What would you like to do next?",)),
    (
        ("Tell me a joke.", "Tell me a joke", "tell me a joke", "Do you know a joke?", "Say something funny."),
        ("Why did the duck cross the road? It was the day off of the hen.",),
    ),
    (("Write a poem.", "Write a short poem.", "Write me a poem.", "Tell me a poem."), (POEM,)),
    (("Say hello.", "Say hi.", "Say hello to me."), ("Hello!",)),
    (("Say hello in one word.", "Greet me in one word."), ("Hello.",)),
    (("What is the meaning of life?",), ("I think it is to learn and to be kind.",)),
    (("Are you an AI?", "Are you human?", "Are you a real person?"), (SELF,)),
    (
        (
            "Hello, what can you do for me today?",
            "What can you do for me?",
            "What do you do?",
            "Tell me about yourself.",
            "What tasks can you do?",
        ),
        (HELP,),
    ),
    (
        ("Can you help me?", "I need help.", "Help me, please.", "Can you help me with something?"),
        ("Yes. What do you need?",),
    ),
    (("Sorry", "Never mind.", "No.", "No, thank you."), ("No problem.",)),
    (("Yes.", "Yes, please.", "Sure."), ("Good. What would you like to do?",)),
    (("What is this?", "What does that mean?", "Why?", "How?"), ("Can you tell me more?",)),
)
"""Questions and their answers."""
ROLES = (
    "You are a helpful assistant.",
    "You are helpful.",
    "You are a helpful AI assistant.",
    "You are an assistant.",
    "Answer the question.",
    "You are a friendly assistant.",
)
CLAUSES = (
    "Be brief.",
    "Be polite.",
    "Answer in short sentences.",
    "Do not make things up.",
    "If you do not know, say so.",
    "You work for a small shop.",
    "The user is a student.",
    "Today is {day}.",
    "Use simple words.",
    "Keep your answers short and clear.",
    "You are running on a small server.",
    "The time is {clock}.",
    "Follow the instructions of the user.",
    "Do not talk about yourself.",
    "The office is in {town}.",
)


def small_talk(draws: Draws) -> tuple[str, str]:
    """Return a greeting or the like, and the answer."""
    questions, answers = draws.choice(SMALL_TALK)
    return draws.choice(questions), draws.choice(answers)


def system_text(draws: Draws) -> str:
    """Return a system prompt that does not change the answers."""
    role = draws.choice(ROLES)
    if draws.chance(0.5):
        return role
    clauses = [
        clause.format(day=draws.choice(DAYS), clock=draws.clock(), town=draws.choice(TOWNS))
        for clause in draws.sample(CLAUSES, draws.randint(1, 5))
    ]
    if draws.chance(0.2):
        clauses += [filler(draws) for _ in range(draws.randint(1, 6))]
    return " ".join([role, *clauses])


def open_request(draws: Draws) -> tuple[str, str]:
    """Return a request far from all tasks, and the polite refusal."""
    if draws.chance(0.5):
        return _order(draws), CANNOT
    return _open_question(draws), UNKNOWN


def _anything(draws: Draws) -> str:
    words = [draws.choice(nouns) for nouns in (COMMON, OBJECTS, TOPICS, PLACES)]
    return draws.choice([*words, draws.rare(False), draws.choice(FOODS)])


def _order(draws: Draws) -> str:
    """Every wording is filled before one is drawn, so that equal seeds give what the model was trained on."""
    choice = draws.choice

    def thing() -> str:
        return _anything(draws)

    return choice(
        [
            f"Write {choice(['a', 'me a', 'an'])} {thing()} about {thing()}.",
            f"Explain {thing()} to me.",
            f"Explain how {thing()} works.",
            f"Write code that can {thing()} the {thing()}.",
            f"Write a Python function that {thing()}s {thing()}.",
            f"Can you {choice(COMMON)} my {thing()}?",
            f"Help me with my {thing()}.",
            f"Can you help me with my {thing()}?",
            f"Draw {with_article(choice(OBJECTS))}.",
            f"Translate {thing()} to {choice(['French', 'German', 'Spanish', 'Italian'])}.",
            f"Make a plan for the {thing()}.",
            f"Write an email to {choice(NAMES)} about the {thing()}.",
            f"Summarize the {thing()}.",
            f"Play {thing()}.",
            f"Compare {thing()} and {thing()}.",
            f"Give me advice about {thing()}.",
            f"Please {choice(COMMON)} the {thing()} and the {thing()}.",
            f"Write {choice(['code', 'a program', 'a script', 'an essay', 'a song', 'a report'])} for {thing()}.",
        ]
    )


def _open_question(draws: Draws) -> str:
    choice = draws.choice

    def thing() -> str:
        return _anything(draws)

    return choice(
        [
            f"Why {choice(['is', 'are', 'does', 'do'])} the {thing()} {thing()}?",
            f"How {choice(['do I', 'can I', 'does one', 'do you'])} {choice(COMMON)} {with_article(thing())}?",
            f"What is {thing()}?",
            f"What is the {thing()} of the {thing()}?",
            f"Who {choice(['invented', 'wrote', 'made', 'won', 'found'])} the {thing()}?",
            f"When {choice(['was', 'did', 'is'])} the {thing()} {thing()}?",
            f"Where {choice(['is', 'can I find', 'are'])} the {thing()}?",
            f"Which {thing()} is the best {thing()}?",
            f"What do you think about {thing()}?",
            f"Do you like {thing()}?",
            f"Is {thing()} good for {thing()}?",
            f"How many {thing()}s are in the {thing()}?",
            f"What happened in {draws.randint(1500, 2030)}?",
            f"Who is {draws.rare(True)}?",
            f"Tell me about {thing()}.",
            f"What does {thing()} mean?",
            f"How far is {draws.rare(True)} from {draws.rare(True)}?",
            f"What is the best {thing()} in {draws.rare(True)}?",
        ]
    )
