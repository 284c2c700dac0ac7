"""Where the seconds of a choice went in the engine: phases that follow one another without gaps."""

from dataclasses import dataclass, field
from typing import Literal

from engine.cache_miss import CacheMiss

PreemptionReason = Literal["growth", "priority", "fairness"]
"""`growth`: a row outgrew its reservation. `priority`: a more urgent request. `fairness`: a client below its share."""

Obstacle = Literal["rows", "memory", "prompts"]
"""`rows`: max_running rows run. `memory`: no room beside them. `prompts`: prompts in progress fill the steps."""

MAX_PHASES = 32


@dataclass(kw_only=True, slots=True)
class Compiling:
    """From the arrival until the device thread has the request; its grammar is compiled meanwhile."""

    seconds: float = 0.0
    has_grammar: bool = False


@dataclass(kw_only=True, slots=True)
class Queued:
    """From the arrival in the queue, or from a preemption, until the admission or the end."""

    seconds: float = 0.0
    num_ahead: int = 0
    """Requests that were queued before."""
    num_decoding: int = 0
    """Rows that decoded when it was queued."""
    num_prompt_tokens: int = 0
    """Tokens that were left of the prompts in progress then."""
    expected_s: float | None = None
    """The wait that was predicted then, None if nothing was known."""
    obstacle: Obstacle | None = None
    """Why it was not admitted when that was last tried; None if it was admitted at once."""
    preempted_by: PreemptionReason | None = None
    """Why the row lost its place; None for the first time in the queue."""


@dataclass(kw_only=True, slots=True)
class EncodedImage:
    """The work on one image in the vision tower."""

    num_patches: int
    seconds: float


@dataclass(kw_only=True, slots=True)
class Prefilled:
    """From the admission to the first token. Between its chunks rows decode and other prompts advance."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Computed tokens of the prompt; after a preemption or in another engine, of the answer as well."""
    num_cached: int = 0
    """Tokens whose state came from the prefix cache."""
    num_chunks: int = 0
    chunks_s: float = 0.0
    """Seconds of its chunks; of a forward with other prompts its share."""
    images: list[EncodedImage] = field(default_factory=list)
    """The images that were encoded; those of a cached prefix are not."""
    miss: CacheMiss | None = None
    """Why it got fewer cached tokens than it could have."""
    saved_s: float = 0.0
    """Predicted seconds of computing the cached tokens."""

    @property
    def others_s(self) -> float:
        """Seconds in which the device worked for others, or restored the cached prefix."""
        return max(0.0, self.seconds - self.chunks_s - sum(image.seconds for image in self.images))


@dataclass(kw_only=True, slots=True)
class Decoded:
    """From the first token, or the first one after a preemption, to the last one or the next preemption."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Tokens of its steps: without the one that the prefill gave, and without a stop token."""
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    stalled_s: float = 0.0
    """Seconds in which the device computed prompts of others between the steps."""


Phase = Compiling | Queued | Prefilled | Decoded


@dataclass(frozen=True, kw_only=True)
class RowTimeline:
    """The phases of one choice in the engine, from the arrival of its request to its last token."""

    index: int
    """Which choice, from 0."""
    phases: tuple[Phase, ...]
    """After many preemptions the first MAX_PHASES."""
    seconds: float
    """Sum of all phases, also of those beyond MAX_PHASES."""
    first_token_s: float | None
    """From the arrival to the first token that this engine generated; None without any."""
    last_token_s: float | None
    """From the arrival to the last token that this engine generated; None without any."""
    num_prompt_tokens: int
    num_cached: int
    num_skipped: int
    """Tokens that a sparse plan skipped."""
    num_tokens: int
    """Tokens that this engine generated, without a stop token."""
    finish_reason: str
    """A value of FinishReason."""
    num_preemptions: int = 0
    num_resumed: int = 0
    """Tokens of the answer that another engine generated before; the arrival is that of the continuation."""
    spent_s: float = 0.0
    """Seconds before the engine, see EngineRequest."""

    @property
    def is_complete(self) -> bool:
        """Whether the choice ended with an answer."""
        return self.finish_reason in ("stop", "length")

    @property
    def total_s(self) -> float:
        """Seconds from the arrival of the HTTP request to the end of the choice."""
        return self.spent_s + self.seconds

    @property
    def wait_s(self) -> float | None:
        """Seconds from the arrival of the HTTP request to the first token; None without any or from another engine."""
        return None if self.first_token_s is None or self.num_resumed else self.spent_s + self.first_token_s

    @property
    def per_token_s(self) -> float | None:
        """Seconds after the first token, per other token; None without others."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def grammar_s(self) -> float | None:
        """Seconds until the device thread had the request, its grammar compiled; None without a grammar."""
        return next((one.seconds for one in self.phases if isinstance(one, Compiling) and one.has_grammar), None)

    @property
    def stalled_s(self) -> float:
        """Seconds in which the device computed prompts of others between the steps."""
        return sum(one.stalled_s for one in self.phases if isinstance(one, Decoded))

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were neither cached nor skipped."""
        return self.num_prompt_tokens - self.num_cached - self.num_skipped

    def seconds_in(self, *kinds: type[Phase]) -> float:
        """Return the seconds in phases of these kinds."""
        return sum(one.seconds for one in self.phases if isinstance(one, kinds))
