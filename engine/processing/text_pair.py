"""PairForm: how a tokenizer joins two texts into one input, such as `[CLS] query [SEP] document [SEP]`."""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from engine.errors import EngineFailed


@dataclass(frozen=True)
class TextPair:
    """Two texts in one input."""

    token_ids: np.ndarray
    """int32 [num_tokens], with the tokens that the tokenizer adds."""
    start: int
    """Index of the first token of type 1, num_tokens if there is none."""


@dataclass(frozen=True)
class PairForm:
    """The tokens that a tokenizer adds to two texts."""

    before: tuple[int, ...]
    """Ids in front of the first text."""
    between: tuple[int, ...]
    """Ids between the texts."""
    after: tuple[int, ...]
    """Ids behind the second text."""
    num_first: int | None
    """How many ids between the texts have type 0, if the second text has type 1; None if all tokens have type 0."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "PairForm":
        """Read the form off the encoding of a pair. Raises EngineFailed if it is another one."""
        probe = tokenizer.encode("a", "b", add_special_tokens=True)
        texts, types, ids = probe.sequence_ids, probe.type_ids, probe.ids
        first, second = ([i for i, text in enumerate(texts) if text == part] for part in (0, 1))
        if not first or not second or first[-1] > second[0]:
            raise EngineFailed("the tokenizer leaves out one of two texts, or joins them in another order")
        end, begin = first[-1] + 1, second[0]
        num_zeros = types.count(0)
        if types != [0] * num_zeros + [1] * (len(types) - num_zeros) or not (
            end <= num_zeros <= begin or num_zeros == len(types)
        ):
            raise EngineFailed(
                f"the tokenizer gives the tokens of two texts the types {types}; supported are 0, then 1"
            )
        return cls(
            before=tuple(ids[: first[0]]),
            between=tuple(ids[end:begin]),
            after=tuple(ids[second[-1] + 1 :]),
            num_first=None if num_zeros == len(types) else num_zeros - end,
        )

    def join(self, first: list[int], second: list[int]) -> TextPair:
        """Join the ids of two texts, each encoded without added tokens."""
        ids = np.array([*self.before, *first, *self.between, *second, *self.after], np.int32)
        end = len(self.before) + len(first)
        return TextPair(ids, len(ids) if self.num_first is None else end + self.num_first)
