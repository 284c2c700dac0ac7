"""Requests to a scorer and their results, and the rules of a sparse plan. Pure; every plan is reproducible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from engine.protocol import Boundary, SparsePlan

PLAN_VERSION = 1
"""Must be increased when equal requests and scores lead to another plan."""

CONTROL_FOLLOWERS = 2
"""Tokens kept after each control token: role and line break of a turn's header, or the name of a tag."""

TAIL_TOKENS = 64
"""Tokens kept at the end of the last turn, where the question usually is."""

KEPT_CHUNK_TOKENS = 32
"""Tokens are kept in chunks of this size, because isolated tokens lose their context."""


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt to score; a sparse plan chooses among its tokens after the first num_dense."""

    request_id: str
    """Id of the request, for log messages."""
    token_ids: np.ndarray
    """int32 [num_prompt_tokens]."""
    num_dense: int
    """Tokens at the beginning that are all kept."""
    anchors: np.ndarray
    """int32, ascending: positions that are always kept, see `find_anchors`."""
    keep: float
    """Share of the tokens after num_dense to keep."""
    boundaries: tuple[Boundary, ...] = ()
    """Boundaries of the EngineRequest; the scorer caches its own state there."""
    tenant: str = ""
    """Tenant of the EngineRequest."""
    limit_s: float | None = None
    """Seconds that a plan saves; scoring that would take longer is refused. None for no limit."""


@dataclass(frozen=True)
class Scored:
    """The result of scoring a prompt."""

    plan: SparsePlan
    """The sparse plan."""
    num_scored: int
    """Tokens that the draft model read for it; the others were cached."""
    seconds: float
    """From request to plan."""


@dataclass(kw_only=True)
class ScorerCounters:
    """Counters of the draft scorer since the start."""

    num_scored: int = 0  # Scored prompts.
    num_scored_tokens: int = 0  # Tokens that the draft read.
    num_reused_tokens: int = 0  # Tokens of scored prompts that it had read for earlier ones.
    num_cancelled: int = 0  # Cancelled by the client.
    num_refused: int = 0  # Refused: queue full, prompt too long, or not possible in time.
    num_failed: int = 0  # Failed with an error.


@dataclass(kw_only=True)
class ScorerStatus(ScorerCounters):
    """The draft scorer for `/v1/status`: current figures, with a copy of its counters."""

    state: str  # loading, ready, unavailable (the draft cannot score, see error), failed, or stopped.
    draft_model: str  # As configured.
    device: str = ""  # MLX's name of it; '' while loading.
    max_prompt_tokens: int = 0  # Longest prompt that it scores: of max_tokens_scored, the draft's context and memory.
    num_running: int = 0  # Prompts being scored.
    num_waiting: int = 0  # Prompts queued.
    memory: dict[str, int] = field(default_factory=dict)  # Bytes by purpose.
    error: str | None = None  # Why it is not ready, None if it is.


def make_plan(request: ScoreRequest, importance: np.ndarray) -> SparsePlan:
    """Make the sparse plan of a scored prompt. Equal arguments give equal plans.

    Args:
        request: The prompt.
        importance: float32 [num_prompt_tokens]; values that are not finite count as 0.
    """
    num_tokens, num_dense = len(request.token_ids), request.num_dense
    chosen = select(importance[num_dense:], request.keep) + num_dense
    last = np.array([num_tokens - 1])
    positions = np.concatenate([np.arange(num_dense), request.anchors, chosen, last])
    positions = np.unique(positions).astype(np.int32)
    return SparsePlan(positions, num_dense, fingerprint(request.token_ids, positions, num_dense))


def select(importance: np.ndarray, keep: float) -> np.ndarray:
    """Return the tokens of the chunks with the highest mean importance; ties are broken by position.

    At least ceil(keep * num_tokens) tokens are kept, in as few chunks as possible, but at least ceil(keep * chunks)
    chunks. The first and the last chunk are always kept: one is the attention sink, the other holds the question.

    Args:
        importance: float [num_tokens]; values that are not finite count as 0.
        keep: Share of the tokens to keep.

    Returns:
        int64, ascending indices.
    """
    num_tokens = len(importance)
    if num_tokens == 0:
        return np.empty(0, np.int64)
    starts = np.arange(0, num_tokens, KEPT_CHUNK_TOKENS)
    sizes = np.minimum(starts + KEPT_CHUNK_TOKENS, num_tokens) - starts
    finite = np.where(np.isfinite(importance), importance, 0).astype(np.float64)
    scores = np.add.reduceat(finite, starts) / sizes
    scores[[0, -1]] = math.inf
    best_first = np.lexsort((np.arange(len(starts)), -scores))
    enough_chunks = max(_ceil(keep * len(starts)), min(2, len(starts)))
    kept_tokens = np.cumsum(sizes[best_first])
    enough_tokens = int(np.searchsorted(kept_tokens, _ceil(keep * num_tokens))) + 1
    chosen = best_first[: max(enough_chunks, enough_tokens)]
    is_chosen = np.zeros(len(starts), bool)
    is_chosen[chosen] = True
    return np.flatnonzero(np.repeat(is_chosen, sizes))


def _ceil(value: float) -> int:
    """Round up, ignoring floating-point errors: 0.1 * 30 becomes 3."""
    return math.ceil(value - 1e-9)


def fingerprint(token_ids: np.ndarray, positions: np.ndarray, num_dense: int) -> str:
    """Return the hex digest of a plan and its prompt's tokens."""
    digest = sha256(f"plan {PLAN_VERSION} {len(token_ids)} {num_dense} {len(positions)}\0".encode())
    for array in (token_ids, positions):
        digest.update(np.ascontiguousarray(array, "<i4").data)
    return digest.hexdigest()


def why_unfit(plan: SparsePlan, token_ids: np.ndarray) -> str | None:
    """Return why a plan does not fit this prompt, None if it does."""
    positions, num_tokens = plan.positions, len(token_ids)
    if positions.ndim != 1 or positions.dtype != np.int32 or not len(positions):
        return f"positions are {positions.dtype} of shape {positions.shape}; expected int32 [k] with k > 0"
    if positions[0] < 0 or positions[-1] != num_tokens - 1:
        return (
            f"positions range from {positions[0]} to {positions[-1]}; they must be 0 or more and end with "
            f"{num_tokens - 1}, the last token of the prompt"
        )
    if not np.all(positions[1:] > positions[:-1]):
        return "positions are not ascending"
    if not 0 <= plan.num_dense <= plan.num_contiguous:
        return f"num_dense is {plan.num_dense}; the plan keeps the first {plan.num_contiguous} tokens"
    if plan.fingerprint != fingerprint(token_ids, positions, plan.num_dense):
        return "it was made for another prompt (the fingerprints differ)"
    return None


def find_anchors(
    token_ids: np.ndarray, control_token_ids: Sequence[int], boundaries: Sequence[Boundary], media: np.ndarray
) -> np.ndarray:
    """Return the positions that are always kept.

    These are control tokens with those that follow, the end of the last turn with all tokens after it, and image
    tokens. `select` always keeps the first and the last chunk.

    Args:
        token_ids: int32 [num_prompt_tokens].
        control_token_ids: The tokenizer's control tokens.
        boundaries: Boundaries of the prompt.
        media: Positions of image tokens.

    Returns:
        int32, ascending.
    """
    num_tokens = len(token_ids)
    control = np.flatnonzero(np.isin(token_ids, list(control_token_ids)))
    near = (control[:, None] + np.arange(CONTROL_FOLLOWERS + 1)).reshape(-1)
    turn = max((b.num_tokens for b in boundaries if b.kind == "turn"), default=num_tokens)
    tail = np.arange(max(turn - TAIL_TOKENS, 0), num_tokens)
    anchors = np.unique(np.concatenate([near, tail, media]))
    return anchors[anchors < num_tokens].astype(np.int32)
