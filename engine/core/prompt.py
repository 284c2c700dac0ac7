"""Prompt: what a request's choices compute together, from the queue until they decode."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.row import Row
from engine.core.virtual_token_counter import OUTPUT_WEIGHT, PROMPT_WEIGHT

if TYPE_CHECKING:
    from engine.core.prefix_cache.restorer import PrefixCacheSession

USUAL_ANSWER = 256
"""Assumed tokens of an answer, where only relative costs matter: fairness, grouping, eviction."""


@dataclass(slots=True, eq=False)
class Prompt:
    """The rows of a request that share a prompt; first queued, then in progress. It becomes the `prompt` of each row.

    Rows that are preempted get a new one: generated tokens belong to the prompt then.
    """

    rows: list[Row]
    """One row per unfinished choice, which all have computed the same part of the prompt."""
    arrived_s: float
    """When it was queued, on the queue's clock."""
    rank: float
    """Sort key in seconds, smallest first: the time of arrival plus the policy's penalty. All prompts age at the same
    rate, so that ranks need not change while they wait."""
    is_protected: bool = False
    """Whether it is protected from preemption for other requests, while it is computed and for ageing_s of decoding;
    else two requests could preempt one another for ever. Set when its rows were preempted (`PromptQueue.requeue`), and
    by the scheduler when it is admitted after waiting for ageing_s."""
    has_output: bool = False
    """Whether its answer has begun: it has tokens, or another engine began it or another choice of its request."""

    blocked_s: float | None = None
    """When it first was the head of the queue and did not fit; None before."""
    growth_tokens: int = 0
    """Predicted tokens that each decoding row generates until this prompt is computed, if it is admitted now."""
    reconsider_eviction_s: float = 0.0
    """Waiting time in seconds after which evicting snapshots for it is considered again."""

    num_prefilled: int = 0
    """Computed tokens that are in its cache, those from the prefix cache included; the same for each row."""
    num_expected: int = 0
    """Tokens that the prefix cache would have served at the last lookup before the prompt has begun."""
    session: "PrefixCacheSession | None" = None
    """Its use of the prefix cache; None before it begins, and without any."""
    is_waiting: bool = False
    """Whether its snapshot is being fetched or read from disk: it is not chosen again in this step."""
    is_alone: bool = False
    """Whether a shared forward with it has failed: it is computed alone from now on."""
    encoded_s: float = 0.0
    """Seconds spent on its images so far."""

    priority: int = field(init=False)
    """Priority of the request; smaller is more urgent."""
    client: str = field(init=False)
    """Client of the request."""
    cost: float = field(init=False)
    """Estimated service in weighted tokens, see virtual_token_counter.py."""

    def __post_init__(self) -> None:
        row = self.rows[0]
        self.priority, self.client = row.spec.priority, row.spec.client
        answer = min(row.num_tokens_left, USUAL_ANSWER)
        self.cost = PROMPT_WEIGHT * row.num_tokens + OUTPUT_WEIGHT * answer * len(self.rows)
        for one in self.rows:
            one.prompt = self

    @property
    def row(self) -> Row:
        """The first of its rows, where all are alike."""
        return self.rows[0]

    @property
    def may_lend(self) -> bool:
        """Whether KV segments of the prefix cache may move to the row that continues them."""
        spec = self.row.spec
        return spec.pooling is None and len(self.rows) == spec.num_choices == 1 and spec.sparse is None

    @property
    def has_started(self) -> bool:
        return self.num_prefilled > 0

    @property
    def start(self) -> int:
        """Tokens that are in its cache, or that the prefix cache is expected to provide."""
        return self.num_prefilled or min(self.num_expected, self.end - 1)

    @property
    def end(self) -> int:
        """All of its tokens, without those that a sparse plan skips."""
        return self.row.num_tokens

    @property
    def num_left(self) -> int:
        """Tokens that are not computed yet, those that the prefix cache is expected to provide included."""
        return self.row.num_tokens - self.num_prefilled

    @property
    def patch_counts(self) -> list[int]:
        """Number of patches of each image that is not entirely before `start`."""
        row = self.row
        media = row.prompt_key.media if row.prompt_key is not None and self.start else ()
        num_done = sum(image.end <= self.start for image in media)
        return [len(image.patches) for image in row.spec.images[num_done:]]

    def is_before(self, other: "Prompt") -> bool:
        """Return whether it is more urgent than the other, and ageing has not reversed their order."""
        return self.priority < other.priority and self.rank < other.rank
