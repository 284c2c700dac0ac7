"""Script: a matcher that forces one answer, so that real steps compute what a small model would not say by itself."""

import numpy as np


class Script:
    """A matcher that allows one text. Implements core.row.Matcher.

    Args:
        token_ids: int32, the answer; its last token is repeated.
        vocab_size: Tokens of the model.
        at: Tokens of the answer so far.
    """

    def __init__(self, token_ids: np.ndarray, vocab_size: int, at: int = 0):
        self._tokens, self._vocab_size, self._at = token_ids, vocab_size, at

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        holds = 0
        while holds < len(draft) and self._token(holds) == draft[holds]:
            holds += 1
        masks = np.zeros((holds + 1, -(-self._vocab_size // 32)), np.uint32)
        for i in range(holds + 1):
            word, bit = divmod(self._token(i), 32)
            masks[i, word] = np.uint32(1) << np.uint32(bit)
        return masks

    def _token(self, ahead: int) -> int:
        return int(self._tokens[min(self._at + ahead, len(self._tokens) - 1)])

    def advance(self, token_ids: tuple[int, ...]) -> None:
        self._at += len(token_ids)

    def fork(self) -> "Script":
        return Script(self._tokens, self._vocab_size, self._at)
