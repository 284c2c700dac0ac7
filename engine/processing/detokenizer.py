"""Detokenizer: the tokens of one request to the text that is certain, ending at a stop string."""

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_SILENT_TOKENS = 64
"""No character has that many tokens: what gave no text for so long is broken bytes, and waiting makes DecodeStream slow
with the square of their number."""


class Detokenizer:
    """One per request. Text comes out once no later token can change it or make it part of a stop string.

    stopped: a stop string was found; the text ends before it and further tokens are ignored.
    num_tokens: tokens taken so far, up to and including the one that completed the stop string.
    Of several stop strings the one that is complete first wins, and the longer one where two end together, so that the
    text does not depend on how it was cut into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self.stopped = False
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._silent: list[int] = []
        self._stop = tuple(s for s in stop if s)
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make certain, possibly ''. Ids outside the vocabulary (padding) are no text."""
        certain = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if piece := self._decode(token_id):
                certain += self._admit(piece)
        return certain

    def finish(self) -> str:
        """What was held back. The bytes of a character that never became complete are dropped."""
        held, self._held = self._held, ""
        return held

    def _decode(self, token_id: int) -> str:
        piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            self._silent.append(token_id)
            if len(self._silent) < MAX_SILENT_TOKENS:
                return ""
            piece = self._tokenizer.decode(self._silent)
            self._stream = DecodeStream(skip_special_tokens=True)
        self._silent.clear()
        return piece

    def _admit(self, piece: str) -> str:
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
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
