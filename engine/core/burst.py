"""Which prompts in progress are computed in one forward: short ones, if that shortens the time to first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.core.cost_model import CostModel
from engine.core.prompt import Prompt

MAX_BURST_ROWS = 32

MAX_START_TOKENS = 4096
"""Most tokens before a chunk in a shared forward: each layer pads and copies the keys and values of all prompts."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a prompt that is not computed yet."""

    num_tokens: int
    """Tokens of its next chunk."""
    start: int
    """Tokens before them."""
    num_left: int = 0
    """Tokens after them, computed in a chunk of their own."""


def may_burst(prompt: Prompt, whole_prompts: bool = False) -> bool:
    """Return whether a prompt may share a forward with others. whole_prompts: see SchedulerContext."""
    spec = prompt.row.spec
    needs_all = spec.computes_all and not whole_prompts
    return len(prompt.rows) == 1 and not spec.images and spec.sparse is None and not needs_all


def burst_s(spans: Sequence[Span], costs: CostModel) -> float:
    """Predict the seconds of one forward with the next chunks of all of these prompts, padded to the longest."""
    longest, start = max(span.num_tokens for span in spans), max(span.start for span in spans)
    return costs.chunk_s(longest, start, len(spans))


def alone_s(span: Span, costs: CostModel) -> float:
    """Predict the seconds until a prompt is complete when it is computed alone."""
    start = span.start + span.num_tokens
    return costs.chunk_s(span.num_tokens, span.start) + costs.chunk_s(span.num_left, start)


def num_together(spans: Sequence[Span], costs: CostModel, max_tokens: int, max_s: float) -> int:
    """Choose how many of the first prompts are computed in one forward.

    A forward of more prompts completes all of them sooner on average but the first of them later; the sum of the mean
    and the longest time to first token is minimized.

    Args:
        spans: Spans of the prompt chosen first, then of the others, the shortest first.
        costs: Predicts seconds.
        max_tokens: Limit of the chunks' tokens, without padding.
        max_s: Limit of the forward's seconds.

    Returns:
        At least 1, which means one prompt after the other.
    """
    alone = [alone_s(span, costs) for span in spans]
    best, least = 1, _wait_s(list(accumulate(alone)))
    for num in range(2, 1 + min(len(spans), MAX_BURST_ROWS)):
        together = spans[:num]
        num_tokens, start = sum(span.num_tokens for span in together), max(span.start for span in together)
        if num_tokens > max_tokens or start > MAX_START_TOKENS or burst_s(together, costs) > max_s:
            break
        ends = _ends_s(together, costs)
        ends += [ends[-1] + each for each in accumulate(alone[num:])]
        if (wait_s := _wait_s(ends)) < least:
            best, least = num, wait_s
    return best


def _ends_s(spans: Sequence[Span], costs: CostModel) -> list[float]:
    """Predict when each prompt is complete if the next chunks, and then the remaining tokens, are computed together."""
    seconds = burst_s(spans, costs)
    left = [Span(span.num_left, span.start + span.num_tokens) for span in spans if span.num_left]
    if not left:
        return [seconds] * len(spans)
    return [seconds] * (len(spans) - len(left)) + [seconds + burst_s(left, costs)] * len(left)


def _wait_s(ends: Sequence[float]) -> float:
    """Return the sum of the mean and the longest wait."""
    return sum(ends) / len(ends) + ends[-1]
