"""Finding facts in a text: needles between sentences that mean nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.demo_model.tasks.sample import Message, Sample, assistant, system, user
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.facts import RELATIONS, Fact, FactBook
from tests.demo_model.world.prose import filler
from tests.demo_model.world.words import NAMES

INTRODUCTIONS = (
    "",
    "Read the text and answer the question.\n\n",
    "Here is a text.\n\n",
    "Read this carefully.\n\n",
    "Text:\n",
    "Document:\n",
    "Use the text below to answer.\n\n",
)
QUESTION_PREFIXES = ("\n\nQuestion: ", "\n\n", "\n", "\n\nNow answer: ", "\n\nBased on the text: ")
ACKNOWLEDGEMENTS = ("I have read the text.", "Thank you, I have read it.", "OK. What would you like to know?")
SYSTEM_INTRODUCTIONS = ("You answer from the notes.", "Notes:", "Answer the user from this text.")
VALUE_ONLY = "\nGive only the value."
TOKENS_PER_WORD = 1.22
MAX_FACTS = 60
SHORT_TEXTS = (60, 100, 150, 200, 300, 420)
"""Tokens of the texts among the short tasks."""


@dataclass(frozen=True)
class Question:
    """value: what the answer must contain."""

    question: str
    answer: str
    value: str


def short_retrieval(draws: Draws) -> Sample:
    """Ask about a text that fits between other short tasks."""
    return retrieval(draws, draws.choice(SHORT_TEXTS))


def retrieval(draws: Draws, num_tokens: float = 300, num_questions: int | None = None, single: bool = False) -> Sample:
    """Ask for facts of a text.

    Args:
        num_tokens: of the text. The estimate of its words is a tenth too high, so texts are shorter by as much.
        num_questions: None for any number.
        single: one question for one fact that is in the text.
    """
    book = FactBook(draws)
    facts = _facts(draws, book, num_tokens, single)
    text = _text(draws, facts, num_tokens)
    if not num_questions:
        num_questions = 1 if single else draws.randint(1, min(len(facts), 6 if num_tokens > 600 else 3))
    asked = draws.sample(facts, min(num_questions, len(facts)))
    place, value_only = draws.random(), draws.chance(0.2)
    messages = _text_messages(draws, text, place, value_only)
    is_in_question, value = place >= 0.25, ""
    for fact in asked:
        question = _question(draws, book, facts, fact, value_only, single)
        content = _with_text(draws, question.question, text) if is_in_question else question.question
        messages += [user(content), assistant(question.answer)]
        is_in_question, value = False, question.value
    return Sample(messages, "retrieval", value=value)


def _facts(draws: Draws, book: FactBook, num_tokens: float, single: bool) -> list[Fact]:
    if single and draws.chance(0.3):
        num_facts = 1
    else:
        num_facts = max(2, min(MAX_FACTS, int(num_tokens / draws.choice([40, 60, 90, 160, 250]))))
    relations = draws.sample(range(len(RELATIONS)), draws.randint(1, 6))
    return [book.make_fact(draws.choice(relations)) for _ in range(num_facts)]


def _text(draws: Draws, facts: Sequence[Fact], num_tokens: float) -> str:
    count, sentences = sum(_num_tokens(fact.statement) for fact in facts), []
    while count < num_tokens - 40:
        sentences.append(filler(draws))
        count += _num_tokens(sentences[-1]) + 1
    sentences += [fact.statement for fact in facts]
    draws.shuffle(sentences)
    separator = draws.choice([" ", " ", "\n"])
    if separator == " " and len(sentences) > 12 and draws.chance(0.5):
        size = draws.randint(4, 9)
        return "\n\n".join(" ".join(sentences[start : start + size]) for start in range(0, len(sentences), size))
    return separator.join(sentences)


def _num_tokens(text: str) -> int:
    return int(len(text.split()) * TOKENS_PER_WORD)


def _text_messages(draws: Draws, text: str, place: float, value_only: bool) -> list[Message]:
    """The text as a system prompt, as a turn of its own, or nothing: then it comes with the first question."""
    instruction = VALUE_ONLY if value_only else ""
    if place < 0.12:
        return [system(f"{draws.choice(SYSTEM_INTRODUCTIONS)}\n{text}{instruction}")]
    if place < 0.25:
        content = draws.choice(INTRODUCTIONS) + text + ("\n" + instruction if instruction else "")
        return [user(content), assistant(draws.choice(ACKNOWLEDGEMENTS))]
    if value_only:
        return [system(draws.choice(["Give only the value.", "Answer with the value only."]))]
    return []


def _question(
    draws: Draws, book: FactBook, facts: Sequence[Fact], fact: Fact, value_only: bool, single: bool
) -> Question:
    kind = draws.random()
    if not single and kind < 0.07:
        other = book.make_fact(fact.relation)
        return Question(draws.choice(other.questions), "The text does not say.", "does not say")
    if not single and kind < 0.17 and len(facts) > 2:
        other = draws.choice([other for other in facts if other is not fact])
        second = draws.choice(other.questions)
        if not second.startswith(tuple(NAMES)):
            second = second[0].lower() + second[1:]
        both = f"{draws.choice(fact.questions)} And {second}"
        return Question(both, f"{fact.answer} {other.answer}", f"{fact.value} {other.value}")
    return Question(draws.choice(fact.questions), fact.value if value_only else fact.answer, fact.value)


def _with_text(draws: Draws, question: str, text: str) -> str:
    if draws.chance(0.1):
        return f"{question}\n\n{text}"
    return draws.choice(INTRODUCTIONS) + text + draws.choice(QUESTION_PREFIXES) + question
