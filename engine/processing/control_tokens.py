"""ControlTokens and Quarantine: what a tokenizer's control strings are, and how a client's text is kept from being one.

Text from a client never becomes a control token. Strings such as `<|im_end|>` inside messages are replaced by sentinels
while the template renders; afterwards the pieces between the sentinels are tokenised as usual and the strings
themselves as plain text. The idea is that of transformers' `sanitize_control_tokens`, which knows no roles, skips keys
and leaves lists of text parts that join into a control token.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

CHECKED_EVERY = 1024
"""Control strings of a request after which it is checked whether there may be more."""


class ControlTokens:
    """The added tokens of a tokenizer, and how each is written in ordinary tokens.

    ids: by string. special_ids: of those that are no text. every, special: patterns that find the strings.
    as_text: the ids of a string as plain text.
    """

    def __init__(self, tokenizer: Tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        # Some tokenizers add runs of spaces or line breaks: no control tokens, and found in every text.
        tokens = {id_: token for id_, token in added.items() if token.content.strip()}
        self.ids = {token.content: id_ for id_, token in tokens.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.every = any_of(self.ids)
        self.special = any_of(token.content for token in tokens.values() if token.special)
        plain = _without_added_tokens(tokenizer)
        self.as_text = {content: self._spell(plain, content) for content in self.ids}

    def _spell(self, plain: Tokenizer, content: str) -> list[int]:
        def encode(text: str) -> list[int]:
            return plain.encode(text, add_special_tokens=False).ids

        spelled = encode_inside(encode, content)
        if self.ids[content] not in spelled:
            return spelled
        return [id_ for char in content for id_ in encode_inside(encode, char)]  # the vocabulary holds it as a word


class Quarantine:
    """The control strings of one request, held back behind sentinels while its template renders.

    check: called with their number now and then while they are found; what it raises ends the search.
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
        """A copy of JSON-like data with the control strings of every key and string held back."""
        if isinstance(value, str):
            return self.text(value, self.control.every)
        if isinstance(value, Mapping):
            return {self.value(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def split(self, rendered: str) -> list[str]:
        """Text, held string, text, held string, ..., text."""
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
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def encode_inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of a piece from the middle of a text: encoded behind a line break that is then removed, because some
    tokenizers (SentencePiece) put a space at the start of every text."""
    line_break, ids = encode("\n"), encode("\n" + text)
    return ids[len(line_break) :] if ids[: len(line_break)] == line_break else encode(text)


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    description = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
