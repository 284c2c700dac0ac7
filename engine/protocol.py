"""What crosses the engine's door: requests in, token chunks out, status, and the errors.

OrchardError
├── InvalidRequest            the caller's fault: names the field, the value and the limit
│   └── ContextLengthExceeded prompt and output do not fit the model's context
│       └── MemoryExceeded    they would not fit the engine's memory if they were alone in it
├── Overloaded                the queue is full: try again later
│   └── QueueTimeout          waited in the queue as long as it may: try again later
├── Cancelled                 somebody has cancelled the request
└── EngineFailed              ours: the model could not be loaded, a step failed
    └── Unavailable           not now, and not the request's fault: the engine is gone, drains, or is short of memory
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from engine.config import BoundaryKind, Pooling, SnapshotKind


class OrchardError(Exception):
    """Every error that we raise on purpose. All arguments reach `Exception`, so that pickling keeps them."""

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message


class InvalidRequest(OrchardError):
    """`field` is the path of the offending field as the client wrote it, such as `messages[2].content`."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message, field)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """is_lower_bound: the prompt has num_prompt_tokens or more; they were not counted to the end."""

    def __init__(self, num_prompt_tokens: int, num_output_tokens: int, limit: int, is_lower_bound: bool = False):
        OrchardError.__init__(self, num_prompt_tokens, num_output_tokens, limit, is_lower_bound)
        self.field = "messages"

    @property
    def message(self) -> str:
        prompt, output, limit, is_lower_bound = self.args
        least = "at least " if is_lower_bound else ""
        return (
            f"This model's context holds {limit} tokens, but the request needs {least}{prompt + output}: "
            f"{least}{prompt} in the prompt and {output} for the answer."
        )


class MemoryExceeded(ContextLengthExceeded):
    """num_bytes: what the request needs; max_bytes: what this engine has for requests, which is room for max_tokens
    tokens in one row."""

    def __init__(self, num_prompt_tokens: int, num_output_tokens: int, max_tokens: int, num_bytes: int, max_bytes: int):
        OrchardError.__init__(self, num_prompt_tokens, num_output_tokens, max_tokens, num_bytes, max_bytes)
        self.field = "messages"

    @property
    def message(self) -> str:
        prompt, output, max_tokens, num_bytes, max_bytes = self.args
        return (
            f"The request needs {num_bytes} bytes of memory: {prompt} tokens in the prompt, {output} for the answer. "
            f"This engine has {max_bytes} bytes for requests, which hold {max_tokens} tokens in one row."
        )


class Overloaded(OrchardError):
    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class QueueTimeout(Overloaded):
    pass


class ScoringTooSlow(OrchardError):
    """Scoring a prompt would take longer than its sparse plan saves."""


class Cancelled(OrchardError):
    pass


class EngineFailed(OrchardError):
    pass


class Unavailable(EngineFailed):
    def __init__(self, message: str, retry_after_s: float = 1.0):
        OrchardError.__init__(self, message, retry_after_s)
        self.retry_after_s = retry_after_s


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    EXPIRED = "expired"  # waited in the queue for too long; `AsyncEngine.generate` raises QueueTimeout instead


MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one row is sampled. Equal parameters and seed give equal tokens, alone or in a batch, with MTP or without.

    The logits of an output position are changed in this order: repetition_penalty (divides positive and multiplies
    negative logits of every token of prompt and output; Keskar et al. 2019), frequency_penalty (per occurrence in the
    output) and presence_penalty (once), both subtracted; logit_bias, pairs (token id, added bias); min_tokens (no stop
    token before that many tokens); the grammar's mask; temperature (0 is greedy), top_k, top_p, min_p. top_k 0,
    top_p 1 and min_p 0 are off. seed is an unsigned 64-bit integer.

    logprobs: None, or how many alternatives are reported beside the sampled token. Logprobs are those of the model:
    before anything of the above. Raises InvalidRequest for anything out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_tokens": (1, 2**31 - 1),
            "temperature": (0, 100),
            "top_p": (0, 1),
            "top_k": (0, 2**31 - 1),
            "min_p": (0, 1),
            "seed": (0, 2**64 - 1),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
            "repetition_penalty": (0.01, 100),
            "min_tokens": (0, self.max_tokens),
            "logprobs": (0, MAX_TOP_LOGPROBS),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", name)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}", "logit_bias"
            )
        for token_id, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias for token {token_id} is {bias}; it must be between -100 and 100", "logit_bias"
                )


@dataclass(frozen=True)
class GrammarSpec:
    """What the output must match, from its first token to the stop token.

    kind: json_schema (text: the schema as JSON), json_object (any JSON object; text is ''), regex, or lark (a grammar
    in llguidance's Lark dialect, which tool calls are made of). field: the client's field, for errors.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""
    field: str = "response_format"


@dataclass(frozen=True)
class ThoughtSpec:
    """The answer begins with a thought which the engine must watch: it has a budget, or a grammar holds behind it.

    A grammar of the request holds from the token behind closing_ids on.
    """

    end_id: int
    """The token that ends the thought, the model's own `</think>`."""
    closing_ids: tuple[int, ...]
    """Tokens that are forced once the budget is used up: the template's closing, end_id among them."""
    budget: int | None = None
    """Most tokens of the thought before the closing; None: no limit."""
    opening_ids: tuple[int, ...] = ()
    """Tokens that are forced first: the thought's opening, where the prompt does not end inside of it."""

    @property
    def resume_ids(self) -> tuple[int, ...]:
        """The tokens of closing_ids behind the one that ends the thought."""
        return self.closing_ids[self.closing_ids.index(self.end_id) + 1 :]


@dataclass(frozen=True)
class ImagePatches:
    """One image, resized and cut for the vision tower, not yet normalised.

    patches: uint8 [grid_t * grid_h * grid_w, channels, patch, patch], in the order of the model's processor.
    grid_thw: patches along time, height and width. num_tokens: placeholder tokens that it takes in the prompt.
    content_hash: hex digest over mode, size and pixels of the image after resizing: over what the model sees.
    """

    patches: np.ndarray
    grid_thw: tuple[int, int, int]
    num_tokens: int
    content_hash: str

    def without_pixels(self) -> "ImagePatches":
        """Return what is known of the image but its patches, whose memory is not kept alive."""
        return replace(self, patches=np.empty((0, *self.patches.shape[1:]), self.patches.dtype))


@dataclass(frozen=True)
class Boundary:
    """A place in a prompt behind which later prompts may go on otherwise, so that its state is worth keeping.

    kind: `system` is the end of the system part (tools included), `turn` the end of the last turn before the one that
    is asked for, `prompt` the last token but one. num_tokens: of the prompt, in front of it.
    """

    kind: BoundaryKind
    num_tokens: int


@dataclass(frozen=True)
class PromptOrigin:
    """What a prompt was rendered with, as digests: they tell why two prompts differ. The tokens alone are the key."""

    tools: str = ""
    template_kwargs: str = ""


@dataclass(frozen=True)
class SparsePlan:
    """Which tokens of a long prompt are computed; the others are left out, and all keep their places.

    positions: int32, ascending: the first num_dense tokens are all among them, so is the last. fingerprint: hex digest
    of the prompt's tokens and of all that is said here, see core/spec_prefill/plan.py.
    """

    positions: np.ndarray
    num_dense: int
    fingerprint: str


@dataclass(frozen=True)
class EngineRequest:
    """token_ids: int32 [num_prompt_tokens], image placeholders already repeated per image token.

    num_choices: answers wanted; they share the prompt's prefill, and choice i is sampled with `choice_seed(seed, i)`.
    priority: smaller is more urgent; only with the scheduler's policy `priority`. boundaries: by num_tokens; the kind
    `prompt` is the engine's own business. tenant: requests share cached prefixes with those of the same tenant alone.
    client: whose share of the engine it takes, see SchedulerConfig.fairness. sampling.max_tokens is a ceiling: the
    engine lowers it to what its memory holds.
    pinned: what is cached at its system boundary is never evicted. sparse: the prompt is taken in by this plan; never
    the state behind the first token that it leaves out reaches the prefix cache.
    checkpoint: fingerprint of the checkpoint that the prompt was tokenized for, see processing/fingerprint.py; a
    replica that serves another one refuses the request. '' is not checked.
    """

    request_id: str
    token_ids: np.ndarray
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    images: tuple[ImagePatches, ...] = ()
    num_choices: int = 1
    grammar: GrammarSpec | None = None
    priority: int = 0
    boundaries: tuple[Boundary, ...] = ()
    tenant: str = ""
    client: str = ""
    origin: PromptOrigin = PromptOrigin()
    pinned: bool = False
    sparse: SparsePlan | None = None
    checkpoint: str = ""
    thought: ThoughtSpec | None = None
    pooling: Pooling | None = None
    """The answer is the pooled hidden state of the prompt, and no token; then sampling counts for nothing, and the
    prefix cache is neither read nor written: the mean needs the hidden states of all tokens."""

    @property
    def num_output_tokens(self) -> int:
        """The most tokens of each answer."""
        return 0 if self.pooling is not None else self.sampling.max_tokens

    @property
    def num_pixel_bytes(self) -> int:
        return sum(image.patches.nbytes for image in self.images)

    def without_pixels(self) -> "EngineRequest":
        """Return the request for those who need its images' sizes and hashes only."""
        return replace(self, images=tuple(image.without_pixels() for image in self.images))


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several choices; the first has the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one output token: its natural logarithm of probability, and (token id, logprob) of the best, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


GRAMMAR_FAILED = "the grammar's matcher failed: "
"""How the error of a choice begins whose grammar passed the limits of its library while tokens were generated: it could
be compiled, and the request is at fault all the same."""


@dataclass(frozen=True)
class TokenChunk:
    """All tokens of one choice since its last chunk. A stop token ends the choice and is not among them.

    `finish_reason` is set on the choice's last chunk alone; `error` tells why when it is ERROR, and `retry_after_s` is
    set if the request was not at fault: sent again, it may succeed. logprobs: one per
    token, if asked for. num_drafted, num_accepted: draft tokens that were verified in these steps, and how many held.
    num_cached: tokens of the prompt that came out of the prefix cache; num_skipped: that its sparse plan left out; both
    are the same in all chunks of a request.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    num_skipped: int = 0
    retry_after_s: float | None = None
    embedding: bytes | None = None
    """The pooled hidden state of the prompt of a request with `pooling`: little-endian float32 [hidden], of length 1.
    Comes with the finish reason."""

    @property
    def is_heartbeat(self) -> bool:
        """Whether it says no more than that the engine is alive: no token, no end, no figure. Belongs to no choice."""
        return not (self.token_ids or self.finish_reason or self.num_drafted)


HEARTBEAT = TokenChunk(())
"""What an engine yields, if asked to, when it has had nothing to say about a request for a while."""


@dataclass(frozen=True)
class PrefillCost:
    """The measured cost of prefill: n tokens behind p others take chunk_s + token_s * n + pair_s * n * (p + n / 2)."""

    chunk_s: float
    """Seconds of a chunk, whatever its size."""
    token_s: float
    """Seconds per prompt token."""
    pair_s: float
    """Seconds per prompt token and token in front of it."""

    def prompt_s(self, start: int, end: int, chunk_tokens: int = 2048) -> float:
        """Predict the seconds that the tokens `start` to `end` of a prompt take in chunks of `chunk_tokens`."""
        num_tokens = max(0, end - start)
        num_chunks = -(-num_tokens // chunk_tokens)
        num_pairs = num_tokens * (start + num_tokens / 2)
        return self.chunk_s * num_chunks + self.token_s * num_tokens + self.pair_s * num_pairs


@dataclass(frozen=True)
class CachedPrefix:
    """The cached prefix of a prompt, and the cost of computing the other tokens."""

    num_tokens: int
    """Tokens of the prompt that the prefix cache holds now."""
    no_sparse: str | None = None
    """Why no sparse plan can be carried out here, None if one can."""
    cost: PrefillCost | None = None
    """Cost of prefill on this engine; None before any chunk was measured."""


@dataclass(frozen=True)
class CacheEntry:
    """One snapshot of the prefix cache. num_bytes: its own, without what it shares with the snapshots in front of it.

    tenant: a digest. where: memory, disk or both. Seconds since it was made and since it was last used.
    """

    kind: SnapshotKind
    num_tokens: int
    num_bytes: int
    num_hits: int
    pinned: bool
    tenant: str
    where: Literal["memory", "disk", "both"]
    age_s: float
    idle_s: float


CacheMissReason = Literal["cold", "evicted", "cleared", "tenant", "image", "tools", "template_kwargs", "text"]


@dataclass(frozen=True)
class CacheMiss:
    """Why a prompt was not served from the cache as far as it could have been.

    num_cached: tokens that were served. boundary, boundary_tokens: of the snapshot that would have served more.
    num_common: tokens that it has in common with the prompt; reason tells what is behind them. For `text`,
    prompt_token_ids and stored_token_ids are the next few tokens of either side. `cold`: there is no such snapshot.
    """

    request_id: str
    reason: CacheMissReason
    num_prompt_tokens: int
    num_cached: int = 0
    num_common: int = 0
    boundary: SnapshotKind | None = None
    boundary_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    stored_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class CacheStatus:
    """The prefix cache for `GET /v1/cache`. off: why there is none, None if there is.

    num_bytes is of the memory alone, max_bytes its budget. num_hits, num_misses: prompts that were served some tokens,
    or none; misses: the latter by reason. num_cached_tokens: served. num_rejected: snapshots that
    did not fit, were not finite, or could not be taken. num_unusable: that were there and could not be restored, or not
    be read back, or not in time: their prompts were computed.
    entries: the most recently used first. recent_misses: the newest first, also of prompts that were served less than
    they could have been. disk: figures of the disk tier, None without one.
    """

    off: str | None = None
    max_bytes: int = 0
    num_bytes: int = 0
    num_entries: int = 0
    num_pinned: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_cached_tokens: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_rejected: int = 0
    num_unusable: int = 0
    num_integrity_errors: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    entries: tuple[CacheEntry, ...] = ()
    recent_misses: tuple[CacheMiss, ...] = ()
    disk: dict[str, int] | None = None


@dataclass(frozen=True)
class CacheCleared:
    """What clearing the prefix cache has freed; pinned snapshots stay."""

    num_entries: int
    num_bytes: int
    num_files: int = 0


@dataclass(frozen=True)
class QueuedRequest:
    """One that waits. position: 1 is the next. expected_wait_s: as requests have been let in lately, None if not known.

    num_rows: choices that wait; num_bytes: of memory that they need at least. preempted: it had begun.
    """

    request_id: str
    position: int
    num_rows: int
    num_bytes: int
    waited_s: float
    expected_wait_s: float | None = None
    preempted: bool = False


@dataclass(frozen=True)
class WorkInHand:
    """The piece of work that the device computes now."""

    name: str
    seconds: float
    """How long it has lasted."""
    predicted_s: float
    """How long the cost model expects it to last; 0 where it says nothing."""
    is_late: bool
    """Whether it takes much longer than predicted."""


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for `/v1/status`: gauges are of this moment, counters since the start. Bytes, seconds, tokens.

    queue: the first of those that wait. admission: the books of the memory, see core/memory/budget.py. unavailable: why
    new requests are turned away now, None if they are not.
    """

    state: str  # loading, warming (pinned prompts are taken in), ready, failed, stopped
    model: str
    load_progress: float  # 0 to 1, of the bytes of the weights; while warming, of the tokens of the pinned prompts
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    max_queue: int = 0
    max_context_tokens: int = 0
    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_expired: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sparse: int = 0
    num_skipped_tokens: int = 0
    num_output_tokens: int = 0
    num_bursts: int = 0
    num_failed_bursts: int = 0
    max_rows_in_a_step: int = 0
    num_preempted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    admission: dict[str, Any] = field(default_factory=dict)
    queue: tuple[QueuedRequest, ...] = ()
    expected_wait_s: float | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)
    work: WorkInHand | None = None
    """None while the device has nothing to do."""
    unavailable: str | None = None
    error: str | None = None
