"""Prompts in progress: their state, the order in which they advance, and how much of a step they may use."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.cost_model import CostModel
from engine.core.request import Request
from engine.core.request_queue import QueueEntry

OLDEST_SHARE = 1 / 3
"""Share of the prefill time that the oldest prompt in progress gets while shorter ones are computed first."""

MIN_IDLE_STEP_S, MAX_IDLE_STEP_S = 0.25, 1.5
"""Bounds in seconds of a step's prefill time while no row decodes: new requests and aborts wait for the end of the
step."""

FIXED_PARTS = 20
"""Within these bounds a step lasts this many times a forward's fixed time, which is then 5 % of it."""


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt in progress, shared by the rows of its request's choices."""

    entry: QueueEntry
    num_expected: int = 0
    """Tokens that the prefix cache would have served when the prompt was admitted."""
    is_waiting: bool = False
    """Whether its snapshot is being read from disk: it is not chosen again in this step."""
    is_alone: bool = False
    """Whether a shared forward with it has failed: it is computed alone from now on."""
    encoded_s: float = 0.0
    """Seconds spent on its images so far."""

    @property
    def rows(self) -> list[Request]:
        return self.entry.rows

    @property
    def has_started(self) -> bool:
        return self.rows[0].num_prefilled > 0

    @property
    def start(self) -> int:
        """Tokens of the prompt that are in its cache, or that the prefix cache is expected to provide."""
        return self.rows[0].num_prefilled or min(self.num_expected, self.end - 1)

    @property
    def end(self) -> int:
        """Tokens of the prompt, without those that a sparse plan skips."""
        return self.rows[0].num_tokens

    @property
    def num_patches(self) -> list[int]:
        """Number of patches of each image that is not entirely before `start`."""
        row = self.rows[0]
        media = row.prompt_key.media if row.prompt_key is not None and self.start else ()
        num_done = sum(image.end <= self.start for image in media)
        return [len(image.patches) for image in row.spec.images[num_done:]]


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
        self._oldest: Prefill | None = None

    def remaining_s(self, prefill: Prefill) -> float:
        """Predict the seconds until the prompt is complete."""
        return self._costs.prompt_s(prefill.start, prefill.end) + self.images_s(prefill)

    def images_s(self, prefill: Prefill) -> float:
        """Predict the seconds until the prompt's images are encoded; its first chunk follows them."""
        return max(0.0, sum(map(self._costs.image_s, prefill.num_patches)) - prefill.encoded_s)

    def choose(self, prefills: Sequence[Prefill], chunk_s: float) -> Prefill:
        """Choose among prompts of equal priority, given in the order of their admission.

        Args:
            prefills: At least one prompt in progress.
            chunk_s: Seconds of a chunk. The oldest prompt is chosen once it is owed this much, unless the shortest
                prompt needs less than this.
        """
        oldest = prefills[0]
        if oldest is not self._oldest:
            self._oldest, self._owed_s = oldest, 0.0
        shortest = min(prefills, key=self.remaining_s)
        if shortest is not oldest and self._owed_s >= chunk_s and self.remaining_s(shortest) > chunk_s:
            return oldest
        return shortest

    def record(self, prefill: Prefill, seconds: float) -> None:
        """Account for seconds spent on this prompt."""
        if self._oldest is None:
            return
        if prefill is self._oldest:
            self._owed_s = max(0.0, self._owed_s - seconds)
        else:
            self._owed_s += seconds * OLDEST_SHARE / (1 - OLDEST_SHARE)
