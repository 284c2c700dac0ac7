"""Compares answers of one request, and tells rounding from faults. Pure.

In float32 equal requests get equal tokens, however they are computed. In lower precision kernels round differently with
the number of rows and tokens in a step. Rounding moves each logprob by at most `Rounding.limit`: it may replace a token
by another one whose logprob is nearly the same, and by no other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.protocol import TokenLogprobs
from engine.self_test.outcome import Outcome, graded

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding one number, by dtype."""

EXACT_UNIT = 2.0**-20
"""With a smaller unit roundoff tokens must be equal."""

SAFETY, EXACT_SAFETY = 4, 16
"""Rounding may move a logprob by this many times the largest measured difference; the latter where tokens are equal."""

EXACT_MOST, EXACT_LEAST = 1e-3, 1e-5
"""Bounds of `Rounding.limit` where tokens must be equal."""

NUM_BEST = 5
"""Tokens per position whose logprobs are compared: that of the best one says little where it is nearly certain."""

NUM_ROUNDINGS = 16
"""Roundings of a logit, and of what it is computed from, that are always allowed."""

MAX_UNITS = 256
"""The most unit roundoffs by which any logprob may move: 16 roundings of a logit of size 16. What is measured may
itself be a fault, so no measurement excuses more."""


@dataclass(frozen=True)
class Rounding:
    """How much rounding moves a logprob on this device.

    Attributes:
        dtype: Floating dtype that the model computes in.
        unit: Unit roundoff of products in that dtype; larger than the dtype's own where a device shortens float32.
        measured: Largest difference of logprobs of the same position that was computed in several ways.
        size: Size of logits: the largest difference of those of the best tokens of one position.
    """

    dtype: str
    unit: float
    measured: float = 0.0
    size: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether tokens must be equal."""
        return self.unit < EXACT_UNIT

    @property
    def most(self) -> float:
        """The largest difference of logprobs that this precision can explain, whatever was measured."""
        return EXACT_MOST if self.is_exact else MAX_UNITS * self.unit

    @property
    def limit(self) -> float:
        """The largest difference of logprobs that is attributed to rounding."""
        if self.is_exact:
            return min(max(EXACT_SAFETY * self.measured, EXACT_LEAST), self.most)
        return min(max(SAFETY * self.measured, NUM_ROUNDINGS * self.unit * self.size), self.most)

    @property
    def rule(self) -> str:
        """The limit in words, for the report."""
        if self.is_exact:
            return f"equal tokens, logprobs within {self.limit:.1e}"
        return f"logprobs within {self.limit:.1e}, other tokens within twice that"


@dataclass(frozen=True)
class Answer:
    """What the engine gave for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached: int = 0  # Prompt tokens from the prefix cache.
    num_skipped: int = 0  # Prompt tokens skipped by a sparse plan.
    num_accepted: int = 0  # Accepted draft tokens.
    error: str | None = None  # Why it failed, None if it did not.


class Difference(NamedTuple):
    """Where two answers of a request differ."""

    position: int
    """The first other token; after it the answers have different prompts, and are not compared."""
    gap: float
    """By how much logprobs moved at least, in both answers together, for one token to replace the other."""


@dataclass(frozen=True)
class Agreement:
    """The comparison of several pairs of answers.

    Attributes:
        num_answers: Compared pairs.
        num_equal: Pairs with equal tokens.
        num_tokens: Tokens of the reference.
        num_compared: Those before the first difference of their answers.
        shift: Largest difference of the logprobs of the best tokens, up to the first difference.
        gap: Largest gap of a first difference; 0 without any.
        errors: Errors of answers that failed, and lengths that differ.
    """

    num_answers: int
    num_equal: int
    num_tokens: int
    num_compared: int
    shift: float
    gap: float
    errors: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """The figures, for the report."""
        text = f"{self.num_equal} of {self.num_answers} answers equal, {self.num_compared} of {self.num_tokens} tokens"
        text += f", logprobs differ by {self.shift:.1e}"
        text += f", gap of other tokens {self.gap:.1e}" if self.num_equal < self.num_answers else ""
        return "; ".join([text, *self.errors[:2]])

    def outcome(self, name: str, rounding: Rounding) -> Outcome:
        """Return PASS for equal tokens, WARN for differences that rounding explains, else FAIL."""
        explained = not self.errors and self.shift <= rounding.limit and self.gap <= 2 * rounding.limit
        is_equal = explained and self.num_equal == self.num_answers
        tolerable = explained and not rounding.is_exact
        return graded(name, self.value, rounding.rule, good=is_equal, tolerable=tolerable)


def agree(reference: Mapping[str, Answer], others: Mapping[str, Answer]) -> Agreement:
    """Compare the answers of the same greedy requests, by request id.

    Args:
        reference: The answers that are right.
        others: The answers to compare with them; requests that are missing count as errors.
    """
    num_equal = num_compared = 0
    shift = gap = 0.0
    errors = []
    for name, answer in reference.items():
        other = others.get(name, Answer((), error="no answer"))
        if (error := answer.error or other.error) is not None:
            errors.append(f"{name}: {error}")
            continue
        difference = first_difference(answer, other)
        if difference is None and len(answer.token_ids) != len(other.token_ids):
            errors.append(f"{name}: {len(other.token_ids)} instead of {len(answer.token_ids)} tokens")
            continue
        end = len(answer.token_ids) if difference is None else difference.position
        shift = max(shift, spread(answer.logprobs[:end], other.logprobs[:end]))
        gap = max(gap, 0.0 if difference is None else difference.gap)
        num_equal, num_compared = num_equal + (difference is None), num_compared + end
    num_tokens = sum(len(answer.token_ids) for answer in reference.values())
    return Agreement(len(reference), num_equal, num_tokens, num_compared, shift, gap, tuple(errors))


def first_difference(answer: Answer, other: Answer) -> Difference | None:
    """Return the first position with other tokens, None if one answer begins with the other.

    A greedy answer stops at a token that it does not contain, so that answers of different lengths may have no such
    position.
    """
    pairs = zip(answer.token_ids, other.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    mine, theirs = answer.token_ids[position], other.token_ids[position]
    gaps = (
        logprob_of(mine, one.logprobs[position]) - logprob_of(theirs, one.logprobs[position]) for one in (answer, other)
    )
    ahead, behind = gaps
    return Difference(position, ahead - behind)


def logprob_of(token_id: int, position: TokenLogprobs) -> float:
    """Return a token's logprob; the lowest reported one, which is too high, for a token that is not reported."""
    reported = dict(position.top)
    return reported.get(token_id, min(reported.values(), default=position.logprob))


def size_of_logits(positions: Sequence[TokenLogprobs]) -> float:
    """Return the largest difference of the logits of the NUM_BEST best tokens of one position."""
    best = ([logprob for _, logprob in one.top[:NUM_BEST]] for one in positions)
    return max((max(logprobs) - min(logprobs) for logprobs in best if logprobs), default=1.0)


def spread(*ways: Sequence[TokenLogprobs]) -> float:
    """Return the largest difference of the logprobs of the NUM_BEST best tokens of each position.

    Args:
        ways: The logprobs of the same positions, computed in several ways.
    """
    largest = 0.0
    for position in zip(*ways, strict=True):
        tables = [dict(one.top) for one in position]
        for token_id, _ in position[0].top[:NUM_BEST]:
            values = [table[token_id] for table in tables if token_id in table]
            largest = max(largest, max(values) - min(values))
    return largest
