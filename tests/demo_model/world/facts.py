"""Facts that a text can state, and the questions about them: fourteen relations, no subject twice in a text."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.demo_model.world.draws import Draws
from tests.demo_model.world.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    COMMON,
    FOODS,
    NAMES,
    OBJECTS,
    PLACES,
    TOPICS,
    TOWNS,
)

MAX_TRIES = 50
"""How often a subject is drawn that the text already has, before another relation is taken."""
SECRETS = [
    *("password", "answer", "secret word", "winner", "code word", "order number", "file name", "user name", "key"),
    *("token", "version", "address", "title"),
]
ATTRIBUTES = ["owner", "color", "size", "price", "number", "leader", "city", "author", "name", "age"]

Subject = tuple[str, ...]


@dataclass(frozen=True)
class Relation:
    """A kind of fact. In the templates {0} and {1} are the parts of the subject; {value} and {variant} are drawn."""

    subject: Callable[[Draws], Subject]
    value: Callable[[Draws, Subject], str]
    statements: tuple[str, ...]  # one is drawn where there are several
    questions: tuple[str, ...]
    answer: str | None = None  # None: as the statement
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """relation: index into RELATIONS."""

    relation: int
    statement: str
    questions: tuple[str, ...]
    answer: str  # a whole sentence
    value: str  # the part of the answer that was asked for


def _attribute_value(draws: Draws, subject: Subject) -> str:
    values = {
        "color": draws.choice(list(COLORS)),
        "size": str(draws.randint(1, 500)),
        "price": str(draws.randint(1, 5000)),
        "number": str(draws.randint(1, 99999)),
        "age": str(draws.randint(1, 99)),
    }
    return values.get(subject[1]) or draws.rare(True)


def _activity(draws: Draws, subject: Subject) -> str:
    meal = f"{draws.choice(['eat', 'buy', 'share', 'try'])} {draws.choice(FOODS)}"
    visit = draws.choice(["sit in", "walk to", "visit", "sleep in"])
    return f"{meal} and {visit} {draws.fill('the {adjective} {place}')}"


RELATIONS: tuple[Relation, ...] = (
    Relation(
        subject=lambda draws: (draws.choice(ADJECTIVES), draws.choice(PLACES)),
        value=lambda draws, _: str(draws.randint(1000, 9999)),
        statements=("The {variant} code of the {0} {1} is {value}.",),
        questions=(
            "What is the {variant} code of the {0} {1}?",
            "What is the code of the {0} {1}?",
            "Tell me the {variant} code of the {0} {1}.",
            "Which code opens the {0} {1}?",
        ),
        variants=("access", "door", "entry", "secret"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(NAMES), draws.choice(OBJECTS)),
        value=lambda draws, _: draws.choice(PLACES),
        statements=("The {1} of {0} is hidden in the {value}.",),
        questions=("Where is the {1} of {0}?", "Where is {0}'s {1} hidden?", "Where is the {1} of {0} hidden?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(NAMES),),
        value=lambda draws, _: draws.choice(TOWNS),
        statements=("{0} lives in {value}.",),
        questions=("Where does {0} live?", "In which town does {0} live?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(NAMES),),
        value=lambda draws, _: draws.choice(list(COLORS)),
        statements=("{0}'s favorite color is {value}.",),
        questions=("What is {0}'s favorite color?", "Which color does {0} like best?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(TOPICS),),
        value=lambda draws, _: draws.clock(),
        statements=("The meeting about {0} starts at {value}.",),
        questions=("When does the meeting about {0} start?", "What time is the meeting about {0}?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(ADJECTIVES), draws.choice(OBJECTS)),
        value=lambda draws, _: str(draws.randint(2, 999)),
        statements=("The {0} {1} costs {value} coins.",),
        questions=("How much does the {0} {1} cost?", "What is the price of the {0} {1}?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(NAMES),),
        value=lambda draws, _: draws.word(),
        statements=("The password of {0} is {value}.",),
        questions=("What is the password of {0}?", "What is {0}'s password?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(CITIES + TOWNS),),
        value=lambda draws, _: str(draws.randint(10000, 9999999)),
        statements=("The special magic number for {0} is {value}.",),
        questions=("What is the special magic number for {0}?", "What is the magic number for {0}?"),
    ),
    Relation(
        subject=lambda draws: (draws.word(),),
        value=lambda draws, _: draws.choice(NAMES),
        statements=("The leader of project {0} is {value}.",),
        questions=("Who leads project {0}?", "Who is the leader of project {0}?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(NAMES),),
        value=lambda draws, _: f"{draws.randint(100, 999)}-{draws.randint(1000, 9999)}",
        statements=("The phone number of {0} is {value}.",),
        questions=("What is the phone number of {0}?", "What is {0}'s phone number?"),
    ),
    Relation(
        subject=lambda draws: (draws.choice(COMMON + OBJECTS + SECRETS),),
        value=lambda draws, _: draws.rare() if draws.chance(0.5) else draws.code(),
        statements=("The {0} is {value}.",),
        questions=("What is the {0}?", "Tell me the {0}.", "Do you know the {0}?"),
    ),
    Relation(
        subject=lambda draws: (draws.rare(True),),
        value=_activity,
        statements=("The best thing to do in {0} is to {value}.",),
        questions=("What is the best thing to do in {0}?", "What should I do in {0}?"),
    ),
    Relation(
        subject=lambda draws: (draws.fill("{common}_{common}"),),
        value=lambda draws, _: draws.code(),
        statements=("{0} = {value}", "{0}: {value}"),
        questions=("What is the value of {0}?", "What is {0}?", "What is {0} set to?"),
        answer="The value of {0} is {value}.",
    ),
    Relation(
        subject=lambda draws: (draws.rare(True), draws.choice(ATTRIBUTES)),
        value=_attribute_value,
        statements=("The {1} of {0} is {value}.",),
        questions=("What is the {1} of {0}?", "Tell me the {1} of {0}."),
    ),
)


class FactBook:
    """Draws the facts of one text: no two have the same subject."""

    def __init__(self, draws: Draws):
        self._draws = draws
        self._subjects: set[tuple[int, Subject]] = set()

    def make_fact(self, relation: int | None = None) -> Fact:
        """Return a new fact of RELATIONS[relation], or of another one when its subjects are used up."""
        draws = self._draws
        if relation is None:
            relation = draws.randrange(len(RELATIONS))
        kind = RELATIONS[relation]
        variant = draws.choice(kind.variants) if kind.variants else ""
        subject = self._unused_subject(relation)
        value = kind.value(draws, subject or ("", ""))
        if subject is None:
            return self.make_fact()
        statement = kind.statements[0] if len(kind.statements) == 1 else draws.choice(kind.statements)

        def fill(template: str) -> str:
            return template.format(*subject, value=value, variant=variant)

        answer = fill(kind.answer or statement)
        return Fact(relation, fill(statement), tuple(map(fill, kind.questions)), answer, value)

    def _unused_subject(self, relation: int) -> Subject | None:
        for _ in range(MAX_TRIES):
            subject = RELATIONS[relation].subject(self._draws)
            if (relation, subject) not in self._subjects:
                self._subjects.add((relation, subject))
                return subject
        return None
