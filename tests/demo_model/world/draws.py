"""Draws: a random generator that also makes up words, names, identifiers and sentences."""

import random
import re
from collections.abc import Sequence
from typing import TypeVar

from tests.demo_model.world.words import COMMON, VOCABULARY

T = TypeVar("T")

CONSONANTS, VOWELS, CODAS = "bcdfghjklmnprstvwz", "aeiou", "nrlskt"
LETTERS, HEX_DIGITS, CAPITALS = "abcdefghijklmnopqrstuvwxyz", "0123456789abcdef", "ABCDEFGHJKLMNPQRSTUVWXYZ"
ENDINGS = ["", "", "er", "ing", "ly", "ness", "ton", "ville", "o", "ia"]
PREFIXES = ["San", "New", "Port", "Saint", "Los", "El", "Lake", "Great", "Fort", "Mount"]

SINGLE_ONSETS = "bcdfghjklmnprstvwyz"
FOREIGN_ONSETS = (
    *SINGLE_ONSETS,
    *("br", "bl", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "kl", "kr", "pl", "pr", "qu", "sch", "sh", "sk"),
    *("sl", "sm", "sn", "sp", "st", "str", "sw", "th", "tr", "ts", "wh", "x", ""),
)
FOREIGN_VOWELS = (*"aeiouaeiou", *("ai", "au", "ea", "ee", "ei", "ia", "ie", "io", "oa", "oo", "ou", "ue", "y"))
FOREIGN_CODAS = (
    *("", "", "", "", "b", "c", "ck", "d", "f", "g", "k", "l", "ll", "m", "n", "nd", "ng", "nk", "nn", "p", "r", "rg"),
    *("rk", "rt", "s", "sh", "ss", "st", "t", "th", "tt", "v", "x", "z", "sco", "burg", "ton", "ham", "vik", "sk"),
    *("land", "field", "ford"),
)
FOREIGN_PARTS = (
    *("San", "New", "Saint", "Los", "Rio", "Bad", "Cape", "North", "South", "East", "West", "Upper", "La", "De", "Van"),
    *("Le", "Mc", "O'", "Hong", "Kuala", "Abu", "Tel", "Den", "Mac", "Santa", "Buenos", "Las"),
)
ACCENTS = "áéüöäñçøå"
SEPARATORS = (" ", " ", " ", "-")


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case, and the others as they are."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return "a noun" or "an noun"."""
    return ("an " if noun[0].lower() in VOWELS else "a ") + noun


def join_list(items: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


class Draws(random.Random):
    """Equal seeds give equal draws. The seed is an int or a string."""

    def __init__(self, seed: int | str, foreign_names: bool = False):
        """foreign_names: more than half of the rare strings sound like names of other languages."""
        super().__init__(seed)
        self.foreign_names = foreign_names

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random() < probability

    def weighted(self, choices: Sequence[tuple[T, float]]) -> T:
        """Return one of the choices; their weights need not add up to 1."""
        left = self.random() * sum(weight for _, weight in choices)
        for choice, weight in choices:
            left -= weight
            if left <= 0:
                return choice
        return choices[-1][0]

    def fill(self, template: str, **words: str) -> str:
        """Return the template with its placeholders filled from left to right: a given word, or one of VOCABULARY."""
        return re.sub(r"\{(\w+)\}", lambda match: words.get(match[1]) or self._word_for(match[1]), template)

    def clock(self) -> str:
        """Return a time of day, such as 7:45."""
        return f"{self.randint(1, 12)}:{self.choice(['00', '15', '30', '45', '10', '20'])}"

    def word(self, min_syllables: int = 2, max_syllables: int = 3) -> str:
        """Return a word that does not exist: a sequence of tokens that can only be copied."""
        return "".join(
            self.choice(CONSONANTS) + self.choice(VOWELS) + (self.choice(CODAS) if self.chance(0.3) else "")
            for _ in range(self.randint(min_syllables, max_syllables))
        )

    def rare(self, capital: bool | None = None) -> str:
        """Return a name or word that takes several tokens. It is trained to be copied verbatim.

        Args:
            capital: whether it begins with a capital letter; None for either. Names of two words always do.
        """
        if self.foreign_names and not self.chance(0.45):
            return self._foreign_name(capital)
        kind = self.random()
        if kind < 0.30:
            word = self.word()
        elif kind < 0.50:
            word = self.choice(COMMON) + self.choice(ENDINGS)
        elif kind < 0.62:
            word = "".join(self.choice(LETTERS) for _ in range(self.randint(3, 8)))
        elif kind < 0.80:
            prefix = self.choice(PREFIXES)
            return f"{prefix} {capitalize(self.choice([self.word(), self.choice(COMMON), self.word(3, 4)]))}"
        elif kind < 0.90:
            word = self.choice(COMMON) + self.choice(["", "", "s"]) + self.choice(COMMON)
        else:
            return f"{capitalize(self.word())} {capitalize(self.word(2, 4))}"
        is_capital = self.chance(0.5) if capital is None else capital
        return capitalize(word) if is_capital else word

    def code(self) -> str:
        """Return an identifier: hex digits, an address, a version, or letters with digits."""
        kind = self.randrange(6)
        if kind == 0:
            return "".join(self.choice(HEX_DIGITS) for _ in range(self.randint(4, 10)))
        if kind == 1:
            return f"{self.fill('{common}')}{self.randint(1, 99)}@{self.word()}.{self.choice(['com', 'org', 'net'])}"
        if kind == 2:
            return f"{self.randint(0, 9)}.{self.randint(0, 20)}.{self.randint(0, 99)}"
        if kind == 3:
            letters = "".join(self.choice(CAPITALS) for _ in range(self.randint(2, 3)))
            return f"{letters}-{self.randint(10, 9999)}"
        if kind == 4:
            return self.fill("{common}_{common}")
        return f"{self.fill('{common}-{common}')}-{self.randint(1, 999)}"

    def _word_for(self, placeholder: str) -> str:
        return str(self.choice(VOCABULARY[placeholder]))

    def _foreign_name(self, capital: bool | None) -> str:
        length = self.random()
        num_words = 1 if length < 0.5 else 2 if length < 0.88 else 3
        words = [self._foreign_word() if self.chance(0.75) else self.choice(FOREIGN_PARTS) for _ in range(num_words)]
        if num_words == 1 and len(words[0]) < 3:
            words[0] += self._foreign_word()
        is_capital = self.chance(0.6) if capital is None else capital
        separator = self.choice(SEPARATORS if num_words > 1 else ("",))
        return separator.join(capitalize(word) if is_capital else word for word in words)

    def _foreign_word(self) -> str:
        word = "".join(
            self.choice(FOREIGN_ONSETS) + self.choice(FOREIGN_VOWELS) + self.choice(FOREIGN_CODAS)
            for _ in range(self.choice([1, 2, 2, 2, 3, 3, 4]))
        )
        return word.replace(self.choice("aeou"), self.choice(ACCENTS), 1) if self.chance(0.06) else word
