"""What travels to a scorer and back, and the rules that a sparse plan must keep. Pure; every plan can be made again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from engine.core.spec_prefill.select import select
from engine.protocol import Boundary, SparsePlan

PLAN_VERSION = 1
"""Raise it when equal requests and scores give another plan."""

CONTROL_FOLLOWERS = 2
"""Tokens kept behind each control token: the role and the line break of a turn's head, the name of a tag."""

TAIL_TOKENS = 64
"""Of the last turn, kept in front of its end: mostly the question."""


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt to be scored as a whole, of which the tokens behind the first num_dense are to be chosen from.

    token_ids: int32 [num_prompt_tokens]. anchors: int32, ascending: tokens behind num_dense that are kept in any case,
    see `find_anchors`. keep: part of the tokens behind num_dense. boundaries, tenant: of the EngineRequest; the scorer
    reuses what it knows of a prefix as the engine does.
    """

    request_id: str
    token_ids: np.ndarray
    num_dense: int
    anchors: np.ndarray
    keep: float
    boundaries: tuple[Boundary, ...] = ()
    tenant: str = ""
    limit_s: float | None = None
    """Seconds that a plan saves: scoring that would take longer is refused. None: it is wanted in any case."""


@dataclass(frozen=True)
class Scored:
    """num_scored: tokens that the draft read for it; the others it knew already. seconds: from request to plan."""

    plan: SparsePlan
    num_scored: int
    seconds: float


@dataclass(frozen=True)
class ScorerStatus:
    """A snapshot for `/v1/status`: gauges are of this moment, counters since the start. Bytes, tokens.

    state: loading, ready, unavailable (the draft cannot score: error tells why), failed, stopped. num_refused: the
    queue was full, the prompt too long, or it would have been late. num_reused_tokens: of scored prompts, read for
    earlier ones.
    """

    state: str
    draft_model: str
    device: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_scored: int = 0
    num_scored_tokens: int = 0
    num_reused_tokens: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    num_failed: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def make_plan(request: ScoreRequest, importance: np.ndarray) -> SparsePlan:
    """importance: float32 [num_prompt_tokens]; not finite is worth nothing. Equal arguments give equal plans."""
    num_tokens, num_dense = len(request.token_ids), request.num_dense
    chosen = select(importance[num_dense:], request.keep) + num_dense
    last = np.array([num_tokens - 1])
    positions = np.concatenate([np.arange(num_dense), request.anchors, chosen, last])
    positions = np.unique(positions).astype(np.int32)
    return SparsePlan(positions, num_dense, fingerprint(request.token_ids, positions, num_dense))


def fingerprint(token_ids: np.ndarray, positions: np.ndarray, num_dense: int) -> str:
    digest = sha256(f"plan {PLAN_VERSION} {len(token_ids)} {num_dense} {len(positions)}\0".encode())
    for array in (token_ids, positions):
        digest.update(np.ascontiguousarray(array, "<i4").data)
    return digest.hexdigest()


def why_unfit(plan: SparsePlan, token_ids: np.ndarray) -> str | None:
    """Why a plan cannot be one for this prompt; None if it can."""
    positions, num_tokens = plan.positions, len(token_ids)
    if positions.ndim != 1 or positions.dtype != np.int32 or not len(positions):
        return f"positions are {positions.dtype} of shape {positions.shape}; expected int32 [k] with k > 0"
    if positions[0] < 0 or positions[-1] != num_tokens - 1:
        return f"positions go from {positions[0]} to {positions[-1]}; the last token of the prompt is {num_tokens - 1}"
    if not np.all(positions[1:] > positions[:-1]):
        return "positions are not ascending"
    if not 0 <= plan.num_dense <= num_contiguous(positions):
        return f"the first {plan.num_dense} tokens are not all kept"
    if plan.fingerprint != fingerprint(token_ids, positions, plan.num_dense):
        return "it was made for another prompt: the fingerprints differ"
    return None


def num_contiguous(positions: np.ndarray) -> int:
    """How many tokens are kept in front of the first one that is left out."""
    gaps = np.flatnonzero(positions != np.arange(len(positions)))
    return int(gaps[0]) if len(gaps) else len(positions)


def find_anchors(
    token_ids: np.ndarray, control_token_ids: Sequence[int], boundaries: Sequence[Boundary], media: np.ndarray
) -> np.ndarray:
    """int32, ascending: what no score may leave out.

    Control tokens with those that follow them, the tail of the last turn with all behind it, and `media` (positions of
    picture tokens). First and last chunk are `select`'s business.
    """
    num_tokens = len(token_ids)
    control = np.flatnonzero(np.isin(token_ids, list(control_token_ids)))
    near = (control[:, None] + np.arange(CONTROL_FOLLOWERS + 1)).reshape(-1)
    turn = max((b.num_tokens for b in boundaries if b.kind == "turn"), default=num_tokens)
    tail = np.arange(max(turn - TAIL_TOKENS, 0), num_tokens)
    anchors = np.unique(np.concatenate([near, tail, media]))
    return anchors[anchors < num_tokens].astype(np.int32)
