"""Small sums, and operations on words and lists, with and without a thought that works them out."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.demo_model.tasks.sample import Sample, assistant, exchange, system, user
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.prose import filler
from tests.demo_model.world.words import ADJECTIVES, ANIMALS, CITIES, COMMON, FRUITS, NAMES, OBJECTS, PLACES

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


def sums(draws: Draws, thinking: bool | None = None) -> Sample:
    """Add or subtract numbers of up to two digits. thinking: None for either."""
    thinking = draws.chance(0.4) if thinking is None else thinking
    messages = [system("You are a helpful assistant.")] if draws.chance(0.15) else []
    sign = draws.choice("++-")
    largest = 9 if draws.chance(0.35) else 99
    a, b = draws.randint(0, largest), draws.randint(0, largest)
    if sign == "-" and b > a:
        a, b = b, a
    result = a + b if sign == "+" else a - b
    spoken = "plus" if sign == "+" else "minus"
    question = draws.choice(
        [
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b}",
            f"Calculate {a} {sign} {b}.",
            f"What is {a}{sign}{b}?",
            f"How much is {a} {spoken} {b}?",
            f"{a} {sign} {b} = ?",
            f"What is {a} {spoken} {b}?",
        ]
    )
    answer = f"{a} {sign} {b} = {result}"
    if draws.chance(0.15):
        name, things = draws.choice(NAMES), draws.choice(OBJECTS) + "s"
        change = f"{'gets' if sign == '+' else 'loses'} {b} {things}"
        question = f"{name} has {a} {things} and {change}. How many {things} does {name} have now?"
        answer = f"{name} has {result} {things} now."
    thought = _by_columns(a, b, sign) if thinking else None
    return Sample([*messages, user(question), assistant(answer, thought)], "arith_think" if thinking else "arith")


def _by_columns(a: int, b: int, sign: str) -> str:
    ones_a, ones_b = a % 10, b % 10
    if sign == "+":
        ones = ones_a + ones_b
        carry = ones // 10
        tens = f"tens: {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}"
        first = f"ones: {ones_a} + {ones_b} = {ones}, write {ones % 10}, carry {carry}"
        return f"{a} + {b}\n{first}\n{tens}\nresult: {a + b}"
    borrow = 1 if ones_a < ones_b else 0
    minuend = ones_a + 10 * borrow
    first = f"ones: {minuend} - {ones_b} = {minuend - ones_b}, borrow {borrow}"
    tens = f"tens: {a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}"
    return f"{a} - {b}\n{first}\n{tens}\nresult: {a - b}"


@dataclass(frozen=True)
class Operation:
    """thought: the work, None where there is none to do."""

    question: str
    answer: str
    thought: str | None = None


def list_operations(draws: Draws, thinking: bool | None = None) -> Sample:
    """Reverse, sort, copy, compare, spell or pick words and numbers. thinking: None for either."""
    make = draws.choice(OPERATIONS)
    thinking = draws.chance(0.5) if thinking is None else thinking
    operation = make(draws)
    if thinking and operation.thought:
        return Sample([user(operation.question), assistant(operation.answer, operation.thought)], "listops")
    return Sample(exchange(operation.question, operation.answer), "listops")


def _reverse(draws: Draws) -> Operation:
    word = draws.choice(FRUITS + ANIMALS + OBJECTS + PLACES) if draws.chance(0.6) else draws.word()
    wordings = ("Reverse the word {}.", "Spell {} backwards.", "Write the word {} in reverse.")
    thought = f"letters: {' '.join(word)}\nreversed: {' '.join(word[::-1])}"
    return Operation(draws.choice(wordings).format(word), word[::-1], thought)


def _sort_numbers(draws: Draws) -> Operation:
    numbers = [draws.randint(0, 99) for _ in range(draws.randint(3, 6))]
    ascending = draws.chance(0.7)
    order = draws.choice(["Sort these numbers", "Sort the list", "Put these numbers in order"])
    question = f"{order}{'' if ascending else ' from big to small'}: {_listed(numbers)}"
    result = sorted(numbers, reverse=not ascending)
    left, steps = list(numbers), []
    for number in result:
        left.remove(number)
        steps.append(f"{'smallest' if ascending else 'biggest'}: {number}, left: {_listed(left) or 'none'}")
    return Operation(question, _listed(result), "\n".join(steps))


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))


def _sort_words(draws: Draws) -> Operation:
    words = draws.sample(FRUITS + ANIMALS, draws.randint(3, 5))
    order = draws.choice(["Sort these words", "Put these words in alphabetical order"])
    thought = "first letters: " + ", ".join(f"{word[0]} {word}" for word in words)
    return Operation(f"{order}: {_listed(words)}", _listed(sorted(words)), thought)


def _repeat(draws: Draws) -> Operation:
    num_words = draws.randint(1, 10) if draws.chance(0.6) else 0
    text = " ".join(_copied_word(draws) for _ in range(num_words)) or filler(draws)
    orders = ("Repeat after me: {}", "Copy this text: {}", "Say exactly: {}", "Repeat: {}", 'Say "{}"', "Echo: {}")
    return Operation(draws.choice(orders).format(text), text)


def _copied_word(draws: Draws) -> str:
    if draws.chance(0.5):
        return draws.rare() if draws.chance(0.7) else draws.code()
    return draws.choice(OBJECTS + ADJECTIVES + ANIMALS + COMMON)


def _extreme(draws: Draws) -> Operation:
    numbers = [draws.randint(0, 99) for _ in range(draws.randint(3, 6))]
    is_largest = draws.chance(0.6)
    kind = draws.choice(["largest", "largest"]) if is_largest else "smallest"  # a draw that all later ones depend on
    answer = f"The {kind} number is {max(numbers) if is_largest else min(numbers)}."
    return Operation(f"What is the {kind} number: {_listed(numbers)}?", answer, f"numbers: {_listed(numbers)}")


def _spell(draws: Draws) -> Operation:
    word = draws.choice(FRUITS + ANIMALS + OBJECTS)
    question = draws.choice(["Spell the word {}.", "Spell {}."]).format(word)
    if draws.chance(0.4):
        thought = "\n".join(f"{number} {letter}" for number, letter in enumerate(word, 1))
        return Operation(
            f"How many letters are in the word {word}?", f"The word {word} has {len(word)} letters.", thought
        )
    return Operation(question, "-".join(word))


def _pick(draws: Draws) -> Operation:
    words = draws.sample(NAMES + OBJECTS + CITIES, draws.randint(3, 7))
    index = draws.randrange(len(words))
    ordinal = ORDINALS[index]
    wordings = ("What is the {0} word: {1}?", "Here is a list: {1}. What is the {0} word?")
    return Operation(draws.choice(wordings).format(ordinal, _listed(words)), f"The {ordinal} word is {words[index]}.")


OPERATIONS: tuple[Callable[[Draws], Operation], ...] = (
    *(_reverse, _sort_numbers, _sort_words, _repeat, _extreme, _spell, _pick),
)
