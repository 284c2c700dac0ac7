"""Lower bounds of a prompt's length, from its characters or from the tokens of its parts.

With them a prompt that cannot fit is refused before all of it is tokenized.
"""

import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.errors import ContextLengthExceeded
from engine.processing.detokenizer import BYTE_OF_CHAR

MAX_CHARS_PER_TOKEN = 8
"""A text with more characters per permitted token is first counted in windows. Prose has about four."""

WINDOW_CHARS, MARGIN_CHARS = 65_536, 1024
"""Size of a window, and of the margins at its ends, whose tokens may differ from those of the whole text."""

_CHUNK_CHARS = 2**20
_PLAIN = frozenset(string.printable) - frozenset(string.whitespace)


class ClientDisconnected(Exception):
    """The client of a prompt has disconnected."""


@dataclass(frozen=True)
class PromptLimit:
    """The longest prompt, and whether the prompt is still needed."""

    max_context_tokens: int
    """Prompt and answer together."""
    num_image_tokens: int = 0
    """Tokens of the prompt in addition to its text."""
    is_wanted: Callable[[], bool] = lambda: True
    """Tells whether the client is still connected."""
    num_output_tokens: int = 1
    """Least tokens of the answer, for which the prompt must leave room."""

    @property
    def max_text_tokens(self) -> int:
        return self.max_context_tokens - self.num_image_tokens - self.num_output_tokens

    def check(self, num_tokens: int, is_lower_bound: bool = True) -> None:
        """Check the length of a prompt's text.

        Args:
            num_tokens: Tokens of the text.
            is_lower_bound: Whether the text may have more tokens.

        Raises:
            ContextLengthExceeded: The text is too long.
            ClientDisconnected: The client has disconnected.
        """
        if not self.is_wanted():
            raise ClientDisconnected
        if num_tokens > self.max_text_tokens:
            num_prompt_tokens = num_tokens + self.num_image_tokens
            limits = self.num_output_tokens, self.max_context_tokens
            raise ContextLengthExceeded(num_prompt_tokens, *limits, is_lower_bound)


class TokenBound:
    """A lower bound of the number of tokens of a text, from its UTF-8 bytes.

    A byte weighs 1 / (length of the longest token that contains it). The bytes of one token weigh at most 1 together,
    and each byte of a text is in one token, so a text has at least as many tokens as its bytes weigh. This requires
    that tokens consist of the unchanged text. Bytes that the tokenizer may drop, replace or merge without limit
    therefore weigh 0: with a normalizer, bytes that are not ASCII or precede such bytes; in a vocabulary of characters,
    spaces and unknown characters; and all bytes if the tokenizer has components that are not known here.
    """

    def __init__(self, tokenizer: Tokenizer):
        description = json.loads(tokenizer.to_str())
        self._is_normalized = bool(list(_components(description["normalizer"], "normalizers")))
        self._weights = _byte_weights(description)

    def of(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text."""
        weights = self._weights
        if not weights.any():
            return 0
        chunks = (text[i : i + _CHUNK_CHARS] for i in range(0, len(text), _CHUNK_CHARS))
        return int(np.ceil(sum(self._weigh(chunk.encode(errors="replace")) for chunk in chunks) - 1e-6))

    def _weigh(self, chunk: bytes) -> float:
        found = np.frombuffer(chunk, np.uint8)
        if self._is_normalized and not chunk.isascii():
            is_ascii = found < 128
            found = found[is_ascii & np.append(is_ascii[1:], False)]
        elif self._is_normalized:
            found = found[:-1]  # the next character may not be ASCII
        return float(np.bincount(found, minlength=256) @ self._weights)


def count_windows(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """Count the tokens of a text window by window, without the incomplete last window.

    Only tokens outside the margins of a window are counted, each in one window, minus two for tokens that cross a
    margin. They equal the tokens of the whole text if no token depends on text that is MARGIN_CHARS away: splitting
    rules look at adjacent characters, and merges span a few tokens.

    Yields:
        A lower bound of the text's tokens after each window.
    """
    num_tokens = 0
    for start in range(0, len(text) - WINDOW_CHARS + 1, WINDOW_CHARS - 2 * MARGIN_CHARS):
        # encode_batch releases the GIL
        [encoded] = tokenizer.encode_batch([text[start : start + WINDOW_CHARS]], add_special_tokens=False)
        first, last = (_token_at(encoded, at) for at in (MARGIN_CHARS, WINDOW_CHARS - MARGIN_CHARS))
        if first is not None and last is not None:
            num_tokens += max(0, last - first - 2)
        yield num_tokens


def _token_at(encoded: Any, at: int) -> int | None:
    """Return the index of the token at a character, or at the next one that has a token; None if there is none."""
    return next((token for i in range(at, at + 64) if (token := encoded.char_to_token(i)) is not None), None)


_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Replace", "Prepend", "Sequence"}
_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "Sequence"}


def _byte_weights(description: dict[str, Any]) -> np.ndarray:
    """Return the weight of each byte, float64 [256]."""
    model, nothing = description["model"], np.zeros(256)
    normalizers = list(_components(description["normalizer"], "normalizers"))
    splitters = list(_components(description["pre_tokenizer"], "pretokenizers"))
    is_known = (
        model["type"] in ("BPE", "Unigram")
        and all(part["type"] in _NORMALIZERS and _replaces_spaces(part) for part in normalizers)
        and all(part["type"] in _PRE_TOKENIZERS and part.get("behavior") != "Removed" for part in splitters)
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
    )
    if not is_known:
        return nothing
    vocabulary = list(model["vocab"]) if model["type"] == "BPE" else [token for token, _ in model["vocab"]]
    if any(part["type"] == "ByteLevel" for part in splitters):
        tokens = [_bytes_of(token) for token in vocabulary]
        counted = {token[0] for token in tokens if len(token) == 1}
    else:
        tokens = [token.encode() for token in vocabulary]
        counted = {ord(token) for token in vocabulary if token in _PLAIN}
    added = description["added_tokens"]
    takes_spaces = any(token["lstrip"] or token["rstrip"] for token in added)
    if takes_spaces or any(part["type"] == "Replace" for part in normalizers):
        counted &= set(map(ord, _PLAIN))
    longest = np.zeros(256)
    for token in [*tokens, *(token["content"].encode() for token in added)]:
        found = np.frombuffer(token, np.uint8)
        longest[found] = np.maximum(longest[found], len(token))
    for byte in counted:
        nothing[byte] = 1 / longest[byte]
    return nothing


def _components(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if part is not None:
        yield part
        for inner in part.get(key, ()):
            yield from _components(inner, key)


def _replaces_spaces(part: dict[str, Any]) -> bool:
    """Return False for a normalizer that replaces anything but a space, which may shorten the text."""
    return part["type"] != "Replace" or part["pattern"] == {"String": " "}


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token in the byte-level alphabet; for another alphabet, at least as many bytes."""
    known = [BYTE_OF_CHAR.get(char) for char in token]
    return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
