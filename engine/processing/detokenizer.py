"""Converts tokens to text.

TokenDecoder: one answer token by token; Detokenizer: one answer up to a stop string; TokenBytes: each token by itself.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_SILENT_TOKENS = 64
"""Most consecutive tokens without text. No character has that many tokens, so they are invalid bytes, for which
DecodeStream takes quadratic time."""


class TokenDecoder:
    """Decodes an answer token by token, in whole characters.

    Args:
        tokenizer: The tokenizer.
        kept: Special tokens whose text is kept, such as the markers of a tool call: id to text.

    Attributes:
        is_quick: Whether `step` may be called for the next token instead of `decode`; `step` returns None for an
            incomplete character, which must then be passed to `wait`.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None):
        self._tokenizer = tokenizer
        self._kept = kept or {}
        self._silent: list[int] = []
        self.is_quick = not self._kept
        self._restart()

    def decode(self, token_id: int) -> str:
        """Return the text that this token completes, possibly ''. Ids outside the vocabulary (padding) have no text."""
        if token_id in self._kept:
            return self._kept[token_id]
        piece = self.step(token_id)
        if piece is None:
            return self.wait(token_id)
        if self._silent:
            self._silent.clear()
            self.is_quick = not self._kept
        return piece

    def _restart(self) -> None:
        self.step = partial(DecodeStream(skip_special_tokens=True).step, self._tokenizer)

    def wait(self, token_id: int) -> str:
        """Record a token without text; after MAX_SILENT_TOKENS of them return them as replacement characters."""
        self._silent.append(token_id)
        self.is_quick = False
        if len(self._silent) < MAX_SILENT_TOKENS:
            return ""
        piece = self._tokenizer.decode(self._silent)
        self._restart()
        self._silent.clear()
        self.is_quick = not self._kept
        return piece


class Detokenizer:
    """Decoder of one choice. Text is returned once no later token can change it or make it part of a stop string.

    The stop string that is complete first wins, and the longer one if two end at the same character, so that the text
    does not depend on its tokenization.

    Attributes:
        stopped: Whether a stop string was found; the text ends before it, and further tokens are ignored.
        num_tokens: Tokens consumed so far, up to and including the one that completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self.stopped = False
        self.num_tokens = 0
        self._decode = TokenDecoder(tokenizer).decode
        self._stop = tuple(s for s in stop if s)
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is certain now, possibly ''. Ids outside the vocabulary have no text."""
        certain = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if piece := self._decode(token_id):
                certain += self._certain(piece)
        return certain

    def finish(self) -> str:
        """Return the withheld text at the end of the answer. The bytes of an incomplete character are dropped."""
        held, self._held = self._held, ""
        return held

    def _certain(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._held + piece
        if matches := [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        num_certain = len(text) - self._num_undecided(text)
        self._held = text[num_certain:]
        return text[:num_certain]

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)


class TokenBytes:
    """Maps each token id to its bytes, special tokens included; concatenated they are the UTF-8 of the text.

    A byte-level tokenizer writes each byte as a character (GPT-2, `bytes_to_unicode`); others write a space as "▁" and
    a byte as "<0xE2>". Ids outside the vocabulary (padding) map to b"".
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._is_byte_level = tokenizer.decoder is not None and tokenizer.decoder.decode(["aĠa"]) == "a a"

    def __call__(self, token_id: int) -> bytes:
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        if self._is_byte_level:
            # a token with any other character is plain text, as in the library's own ByteLevel decoder
            if all(char in BYTE_OF_CHAR for char in token):
                return bytes(BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 maps to itself, the n-th other byte is the character 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
