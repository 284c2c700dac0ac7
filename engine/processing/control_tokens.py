"""ControlTokens: a tokenizer's control strings; ControlTokenEscaper: escapes them in a client's text.

A client's text never becomes a control token. Strings such as `<|im_end|>` in messages are replaced by sentinels while
the template renders; afterwards the text between the sentinels is tokenized as usual and the strings as plain text.
transformers' `sanitize_control_tokens` has the same idea, but ignores roles, skips keys and misses lists of text parts
that join into a control token.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

CHECKED_EVERY = 1024
"""Interval, in escaped control strings of a request, at which `check` is called."""


class ControlTokens:
    """The added tokens of a tokenizer, and their spelling in ordinary tokens.

    Args:
        tokenizer: The tokenizer.
        words: Pattern of added tokens that are words, which every text may spell; '' for none.
        texts: Strings that stand for something in the chat template, as tokens or without being any: they are escaped
            as well.

    Attributes:
        ids: String to id.
        special_ids: Ids of special tokens, which decoding drops.
        added: Pattern of the strings of all tokens.
        every: Pattern of all strings that a text may not contain: those of all tokens, and `texts`.
        special: Pattern of those that an assistant's text may not contain: those of special tokens, and `texts`.
        as_text: String to the ids of its spelling as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, words: str = "", texts: Sequence[str] = ()):
        added = tokenizer.get_added_tokens_decoder()
        # Some tokenizers add runs of spaces or line breaks, which are no control tokens and occur in every text.
        tokens = {
            id_: token
            for id_, token in added.items()
            if token.content.strip() and not (words and re.fullmatch(words, token.content))
        }
        self.ids = {token.content: id_ for id_, token in tokens.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        escaped = dict.fromkeys([*self.ids, *texts])
        self.added = any_of(self.ids)
        self.every = any_of(escaped)
        self.special = any_of([*(token.content for token in tokens.values() if token.special), *texts])
        plain = without_added_tokens(tokenizer)
        self.as_text = {content: self._spell(plain, content) for content in escaped}

    def _spell(self, plain: Tokenizer, content: str) -> list[int]:
        def encode(text: str) -> list[int]:
            return plain.encode(text, add_special_tokens=False).ids

        spelled = encode_inside(encode, content)
        if self.ids.get(content) not in spelled:
            return spelled
        return [id_ for char in content for id_ in encode_inside(encode, char)]  # the vocabulary has it as a word


class ControlTokenEscaper:
    """Replaces the control strings of one request by sentinels while its template renders.

    Args:
        control: The tokenizer's control tokens.
        check: Called with the number of strings so far, every CHECKED_EVERY strings; may raise to end the search.
    """

    def __init__(self, control: ControlTokens, check: Callable[[int], None] = lambda num_held: None):
        self.control = control
        self.held: list[str] = []
        self._check = check
        self._nonce = f"Q{secrets.token_hex(8)}Q"
        self._sentinel = re.compile(self._nonce + r"(\d+)Q")

    def text(self, text: str, pattern: re.Pattern[str]) -> str:
        return pattern.sub(self._hold, text)

    def value(self, value: Any) -> Any:
        """Return a copy of JSON-like data with the control strings in every key and string escaped."""
        if isinstance(value, str):
            return self.text(value, self.control.every)
        if isinstance(value, Mapping):
            return {self.value(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def split(self, rendered: str) -> list[str]:
        """Split a rendered text into [text, control string, text, control string, ..., text]."""
        if not self.held:
            return [rendered]
        pieces = self._sentinel.split(rendered)
        pieces[1::2] = [self.held[int(index)] for index in pieces[1::2]]
        return pieces

    def restore(self, text: str) -> str:
        return "".join(self.split(text))

    def _hold(self, match: re.Match[str]) -> str:
        self.held.append(match[0])
        if len(self.held) % CHECKED_EVERY == 0:
            self._check(len(self.held))
        return f"{self._nonce}{len(self.held) - 1}Q"


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the strings, longer ones first; without strings it matches nothing."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def encode_inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encode a piece from the middle of a text.

    It is encoded after a line break that is then removed, since some tokenizers (SentencePiece) prefix every text with
    a space.
    """
    line_break, ids = encode("\n"), encode("\n" + text)
    return ids[len(line_break) :] if ids[: len(line_break)] == line_break else encode(text)


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that spells control strings in ordinary tokens."""
    description = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))


def unmarked(tokenizer: Tokenizer, words: str) -> Tokenizer:
    """Return a tokenizer in which words are no special tokens, so that decoding keeps them; a copy if any of them is.

    Args:
        tokenizer: The tokenizer.
        words: See ControlTokens.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    marked = {token.content for token in added if token.special and re.fullmatch(words, token.content)}
    if not marked:
        return tokenizer
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in marked
    return Tokenizer.from_str(json.dumps(description))
