"""The engine's interface: requests, token chunks, and the cost of a prompt; see also errors.py and status.py."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np

from engine.config import BoundaryKind, Pooling
from engine.errors import InvalidRequest, OrchardError
from engine.placement import ConversationKeys, PrefixHolder
from engine.timeline import RowTimeline


class FinishReason(StrEnum):
    """Why a choice finished."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    EXPIRED = "expired"  # exceeded queue_timeout_s; `AsyncEngine.generate` raises QueueTimeout instead
    MOVED = "moved"  # the engine drains: another one continues the choice from its tokens, see Progress


MAX_TOP_LOGPROBS = 20


MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a row.

    Equal parameters and seed give equal tokens, alone or in a batch, with MTP or without.

    The logits of an output position are processed in this order: repetition penalty, frequency penalty, presence
    penalty, logit bias, min_tokens, grammar mask, temperature, top_k, top_p, min_p.

    Raises:
        InvalidRequest: A value is out of range.
    """

    max_tokens: int  # Most tokens of the answer.
    temperature: float = 1.0  # 0 is greedy.
    top_p: float = 1.0  # 1 is off.
    top_k: int = 0  # 0 is off.
    min_p: float = 0.0  # 0 is off.
    seed: int = 0  # Unsigned 64-bit integer.
    presence_penalty: float = 0.0  # Subtracted once from the logits of tokens in the output.
    frequency_penalty: float = 0.0  # Subtracted for each occurrence in the output.
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (Keskar et al. 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()  # Pairs (token id, added bias).
    min_tokens: int = 0  # No stop token is sampled before this many tokens.
    logprobs: int | None = None
    """Number of alternatives to report per token, None for no logprobs. Logprobs are the model's own, before any
    processing."""

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
    """A grammar that the output must match, from its first token to the stop token."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    """`json_object` is any JSON object; `lark` is llguidance's Lark dialect, used for tool calls."""
    text: str = ""  # The JSON schema, regex or Lark grammar; '' for json_object.
    field: str = "response_format"  # The client's field, for error messages.
    left_open: tuple[str, ...] = ()
    """Parts of the tools' schemas that it does not enforce, such as `tools (f): $.properties.a.not`."""


@dataclass(frozen=True)
class ThoughtSpec:
    """A thought at the beginning of the answer, with a token budget or followed by a grammar.

    The request's grammar applies from the token after closing_ids on.
    """

    end_id: int
    """The token that ends the thought, the model's own `</think>`."""
    closing_ids: tuple[int, ...]
    """Tokens that are forced once the budget is used up: the template's closing, which contains end_id."""
    budget: int | None = None
    """Most tokens of the thought before the closing; None for no limit."""
    opening_ids: tuple[int, ...] = ()
    """Tokens that are forced first: the thought's opening, if the prompt does not end inside the thought."""

    @property
    def resume_ids(self) -> tuple[int, ...]:
        """The tokens of closing_ids after end_id."""
        return self.closing_ids[self.closing_ids.index(self.end_id) + 1 :]


@dataclass(frozen=True)
class FrameOfVideo:
    """Which frames of which video an image is."""

    video: int  # Number of the video in its request.
    time_s: float  # Seconds from its beginning, the mean of the frames that share patches.


@dataclass(frozen=True)
class ImagePatches:
    """One image, resized and cut into patches for the vision tower, not yet normalized.

    Frames of a video that share patches are an image, too; its patches have the colours of all of them.
    """

    patches: np.ndarray
    """uint8 [num_patches, channels, patch, patch], in the order of the model's processor; of frames with
    channels * frames instead of channels, colours first."""
    grid_thw: tuple[int, int, int]  # Frames or tiles, and patches along height and width of each.
    num_tokens: int  # Image tokens in the prompt.
    content_hash: str  # Hex digest of mode, size, padding and pixels after resizing.
    tiles: tuple[int, int] = (0, 0)  # Tiles along height and width; (0, 0) for an image in one piece.
    unpadded: tuple[int, int] = (0, 0)
    """Patches of all tiles without padding, or without those in which they overlap, likewise; else (0, 0)."""
    thumbnail: tuple[int, int] = (0, 0)
    """Patches along height and width of a thumbnail behind the tiles, if it has a shape of its own; else (0, 0)."""
    inner: tuple[int, int] = (0, 0)
    """Pixels along height and width of the image within the padding of its tiles, if the tower asks; else (0, 0)."""
    frame: FrameOfVideo | None = None  # None for an image.

    def without_pixels(self) -> "ImagePatches":
        """Return the image without its patches, so that their memory is not kept alive."""
        return replace(self, patches=np.empty((0, *self.patches.shape[1:]), self.patches.dtype))


@dataclass(frozen=True)
class Boundary:
    """A place in a prompt after which later prompts may differ, so that its state is worth caching."""

    kind: BoundaryKind
    """`system`: end of the system part with its tools, or of the template's default. `turn`: end of the last turn
    before the requested one. `prompt`: before the last token."""
    num_tokens: int
    """Tokens of the prompt before it."""


@dataclass(frozen=True)
class PromptOrigin:
    """Digests of what a prompt was rendered with. They explain cache misses; only the tokens are compared."""

    tools: str = ""
    template_kwargs: str = ""


@dataclass(frozen=True)
class SparsePlan:
    """The tokens of a long prompt to compute; the others are skipped, and all keep their positions."""

    positions: np.ndarray
    """int32, ascending; contains the first num_dense tokens and the last token of the prompt."""
    num_dense: int
    """Tokens at the beginning that the plan keeps on purpose."""
    fingerprint: str
    """Hex digest of the prompt's tokens and this plan, see core/spec_prefill/plan.py."""

    @property
    def num_contiguous(self) -> int:
        """Tokens before the first skipped one, which may be more than num_dense."""
        gaps = np.flatnonzero(self.positions != np.arange(len(self.positions)))
        return int(gaps[0]) if len(gaps) else len(self.positions)


@dataclass(frozen=True)
class Progress:
    """One choice of a request that another engine began."""

    token_ids: tuple[int, ...] = ()
    """Tokens of the answer so far, without a stop token."""
    is_finished: bool = False
    """Whether the choice is complete: it gets no row and no chunk."""


@dataclass(frozen=True)
class EngineRequest:
    """A request of token ids: one prompt, and `num_choices` answers that share its prefill."""

    request_id: str
    """Unique among open requests."""
    token_ids: np.ndarray
    """int32 [num_prompt_tokens], with one placeholder per image token."""
    sampling: SamplingParams
    """Its max_tokens is a ceiling: the engine lowers it to what its memory holds."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    images: tuple[ImagePatches, ...] = ()
    """In the order of their placeholders."""
    num_choices: int = 1
    """Answers; choice i is sampled with `choice_seed(seed, i)`."""
    grammar: GrammarSpec | None = None
    """Constrains the answers."""
    priority: int = 0
    """Smaller is more urgent; only with the scheduler's policy `priority`."""
    boundaries: tuple[Boundary, ...] = ()
    """Where to cache the prompt's state, by num_tokens; the engine adds the kind `prompt` itself."""
    tenant: str = ""
    """Cached prefixes are shared only within a tenant."""
    client: str = ""
    """Unit of fairness, see SchedulerConfig.fairness."""
    origin: PromptOrigin = PromptOrigin()
    """Digests of the template variables that the prompt was rendered with."""
    pinned: bool = False
    """Whether the snapshot at its system boundary is never evicted."""
    sparse: SparsePlan | None = None
    """Prefill by this plan. States after the first skipped token are never cached."""
    checkpoint: str = ""
    """Fingerprint of the checkpoint whose tokenizer made the prompt, see processing/fingerprint.py; replicas of another
    one refuse the request. '' is not checked."""
    thought: ThoughtSpec | None = None
    """The thought to watch."""
    pooling: Pooling | None = None
    """Answer with the pooled hidden state of the prompt, without tokens. Sampling is ignored, and the prefix cache is
    not used: the mean needs the hidden states of all tokens."""
    scored_tokens: tuple[int, int] | None = None
    """With the pooling `last`: answer with the logit of the first token minus that of the second, instead of the hidden
    state that gives them."""
    pair_start: int | None = None
    """With the pooling `cls`, of an encoder that scores pairs: answer with the logit of its only class. Tokens from
    this index on have type 1, that of the second text."""
    prompt_logprobs: int | None = None
    """Report the logprobs of the prompt's tokens, with this many alternatives each; None: do not. The prompt is
    computed in chunks of few tokens, and nothing of it comes from the prefix cache."""
    http_request_id: str = ""
    """X-Request-ID of the HTTP request, for the log; '' without one."""
    spent_s: float = 0.0
    """Seconds from the arrival of the HTTP request until it was sent to the engine."""
    keys: ConversationKeys | None = None
    """Keys of the conversation, by which questions find what is cached of it; None: it is found by tokens alone."""
    holder: PrefixHolder | None = None
    """Another node that has more of the prompt cached, as far as is known; it is asked if fetching is predicted to be
    faster than computing."""
    progress: tuple[Progress, ...] = ()
    """One per choice: its tokens from another engine, after which the answer continues as if this engine had generated
    them. They count as output everywhere: for max_tokens, min_tokens, penalties, seeds, grammar and thought. () for a
    request that begins."""

    @property
    def open_choices(self) -> tuple[int, ...]:
        """Indices of the choices that are not finished yet."""
        return tuple(i for i in range(self.num_choices) if not (self.progress and self.progress[i].is_finished))

    @property
    def computes_all(self) -> bool:
        """Whether the engine has to compute every token of the prompt by itself."""
        return self.pooling is not None or self.prompt_logprobs is not None

    @property
    def num_output_tokens(self) -> int:
        """Most tokens of each choice."""
        return 0 if self.pooling is not None else self.sampling.max_tokens

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of all images' patches."""
        return sum(image.patches.nbytes for image in self.images)

    def without_pixels(self) -> "EngineRequest":
        """Return the request with images reduced to their sizes and hashes."""
        return replace(self, images=tuple(image.without_pixels() for image in self.images))


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one of several choices; the first has the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one output token, natural logarithms."""

    logprob: float  # Logprob of the sampled token.
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the best alternatives, best first.


GRAMMAR_FAILED = "the grammar's matcher failed: "
"""Prefix of the error of a choice whose grammar compiled but exceeded the grammar library's limits during
generation; the request is at fault."""


@dataclass(frozen=True)
class TokenChunk:
    """All tokens of one choice since its last chunk. A stop token ends the choice and is not included."""

    token_ids: tuple[int, ...]
    """New tokens."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of the choice only."""
    error: str | None = None
    """Why, if the finish reason is ERROR or EXPIRED."""
    index: int = 0
    """Which choice, from 0."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if requested."""
    num_drafted: int = 0
    """Draft tokens verified in these steps."""
    num_accepted: int = 0
    """Accepted draft tokens among token_ids."""
    num_cached: int = 0
    """Prompt tokens from the prefix cache; equal in all chunks of a request, or of a choice if it has `progress`."""
    num_skipped: int = 0
    """Prompt tokens skipped by a sparse plan; equal in all chunks of a request."""
    retry_after_s: float | None = None
    """Set on an error that is not the request's fault: a retry may succeed."""
    embedding: bytes | None = None
    """Pooled hidden state of a request with `pooling`: little-endian float32 [hidden] of norm 1, or [1], the score:
    the difference of the logits of its `scored_tokens`, or the logit of a pair. Set together with the finish reason."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Logprobs of the prompt's tokens, from the second one on, if requested. The first chunk of one choice has them."""
    timeline: RowTimeline | None = None
    """Set with the finish reason, except on an error that the device thread did not send."""

    @property
    def is_heartbeat(self) -> bool:
        """Whether it only says that the engine is alive. A heartbeat belongs to no choice."""
        return not (self.token_ids or self.finish_reason or self.num_drafted)


HEARTBEAT = TokenChunk(())
"""Yielded on request when there was no output for a while."""


@dataclass(frozen=True)
class GroupEnds:
    """The requests of a group that have ended since the last message."""

    ends: tuple[tuple[int, TokenChunk | OrchardError], ...] = ()
    """Index in the group, and the last chunk of the request or the error that ended it, after which nothing follows."""

    @property
    def is_heartbeat(self) -> bool:
        """Whether it only says that the engine is alive."""
        return not self.ends


@dataclass(frozen=True)
class PrefillCost:
    """Measured cost of prefill.

    n tokens after p others take chunk_s + token_s * n + pair_s * n * (p + n / 2) seconds.
    """

    chunk_s: float
    """Seconds of a chunk, whatever its size."""
    token_s: float
    """Seconds per prompt token."""
    pair_s: float
    """Seconds per pair of a prompt token and a preceding token."""

    def prompt_s(self, start: int, end: int, chunk_tokens: int = 2048) -> float:
        """Predict the seconds of a prompt's tokens `start` to `end` in chunks of `chunk_tokens`."""
        num_tokens = max(0, end - start)
        num_chunks = -(-num_tokens // chunk_tokens)
        num_pairs = num_tokens * (start + num_tokens / 2)
        return self.chunk_s * num_chunks + self.token_s * num_tokens + self.pair_s * num_pairs


@dataclass(frozen=True)
class CachedPrefix:
    """The cached prefix of a prompt, and the cost of computing its other tokens."""

    num_tokens: int
    """Prompt tokens that are cached now."""
    no_sparse: str | None = None
    """Why this engine cannot execute a sparse plan, None if it can."""
    cost: PrefillCost | None = None
    """Cost of prefill on this engine; None before any chunk was measured."""
