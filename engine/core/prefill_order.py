"""The order in which prompts in progress advance, and how much of a step they may use."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.cost_model import CostModel
from engine.core.prompt import Prompt

OLDEST_SHARE = 1 / 3
"""Share of the prefill time that the oldest prompt in progress gets while shorter ones are computed first."""

OLDEST_PER_OTHER_S = OLDEST_SHARE / (1 - OLDEST_SHARE)
"""Seconds that the oldest prompt in progress gets per second of shorter ones."""


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that prefill may still use in the current step."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_chunks: int = 0
    """Chunks computed in this step."""

    @property
    def has_started(self) -> bool:
        """Whether a chunk has been computed in this step."""
        return self.num_chunks > 0

    @property
    def is_over(self) -> bool:
        """Whether no further chunk may be computed in this step; the first one ignores the time."""
        return self.num_tokens <= 0 or (self.has_started and self.seconds <= 0)

    def use(self, num_tokens: int, seconds: float) -> None:
        """Account for one chunk or piece of an image."""
        self.num_tokens -= num_tokens
        self.seconds -= seconds
        self.num_chunks += 1

    def limit(self, seconds: float) -> None:
        """Limit the remaining time."""
        self.seconds = min(self.seconds, seconds)

    def close(self) -> None:
        """Allow no further chunk."""
        self.num_tokens = 0


class PrefillOrder:
    """Chooses the prompt with the fewest seconds left, and guarantees the oldest one a share of the time."""

    def __init__(self, costs: CostModel):
        self._costs = costs
        self._owed_s = 0.0
        self._oldest: Prompt | None = None

    def remaining_s(self, prompt: Prompt) -> float:
        """Predict the seconds until the prompt is complete."""
        return self._costs.prompt_s(prompt.start, prompt.end) + self.images_s(prompt)

    def images_s(self, prompt: Prompt) -> float:
        """Predict the seconds until the prompt's images are encoded; its first chunk follows them."""
        return max(0.0, sum(map(self._costs.image_s, prompt.patch_counts)) - prompt.encoded_s)

    def choose(self, prompts: Sequence[Prompt], chunk_s: float) -> Prompt:
        """Choose among prompts of equal priority, given in the order of their admission.

        Args:
            prompts: At least one prompt in progress.
            chunk_s: Seconds of a chunk. The oldest prompt is chosen once it is owed this much, unless the shortest
                prompt needs less than this.
        """
        oldest = prompts[0]
        if oldest is not self._oldest:
            self._oldest, self._owed_s = oldest, 0.0
        shortest = min(prompts, key=self.remaining_s)
        if shortest is not oldest and self._owed_s >= chunk_s and self.remaining_s(shortest) > chunk_s:
            return oldest
        return shortest

    def record(self, prompt: Prompt, seconds: float) -> None:
        """Account for seconds spent on this prompt."""
        if self._oldest is None:
            return
        if prompt is self._oldest:
            self._owed_s = max(0.0, self._owed_s - seconds)
        else:
            self._owed_s += seconds * OLDEST_PER_OTHER_S
