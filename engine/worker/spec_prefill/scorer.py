"""Scores prompts in turns on the device thread: each step computes one chunk or one look-ahead token of one prompt.

A late plan is useless, and so is one that saves less time than it takes. A prompt is refused if the draft, at its
measured speed, cannot read all open prompts within deadline_s, or within what the plan saves; it is aborted when that
becomes certain later; and a prompt that is in danger of being late goes first.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.config import EngineConfig
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.snapshot_boundaries import choose_boundaries
from engine.core.spec_prefill.pace import RETRY_FADE, Pace
from engine.core.spec_prefill.plan import ScoreRequest
from engine.errors import EngineFailed
from engine.protocol import Boundary
from engine.spec_prefill_config import SpecPrefillConfig
from engine.start_phase import StartPhase
from engine.worker import memory
from engine.worker.kv_cache import SequenceCache
from engine.worker.spec_prefill.draft import Draft, load_draft
from engine.worker.spec_prefill.limits import Limits
from engine.worker.spec_prefill.reuse import DraftReuse

log = logging.getLogger("orchard.scorer")

DEVICE_SHARE = 0.1
"""Default share of the device's memory for weights and caches."""

MIN_MEASURED_TOKENS = 64
"""Smaller forwards are not measured, because their fixed time dominates."""

PROBE_TOKENS, MAX_PROBE_S = (64, 64, 128, 256), 0.5
"""Tokens of the chunks that are read after loading, and the seconds after which no further one is."""

MIN_TOKENS = 16
"""Fewest tokens between a snapshot and the one before it."""

URGENT = 0.2
"""Share of deadline_s: a prompt with less slack goes first."""

LOOK_WEIGHT = 0.3
"""Weight of the newest prompt in the moving average of seconds per look-ahead step."""

MAX_COPIED_BYTES = 2**28
"""A step launched while the previous one runs copies the cache that it writes to. With larger caches it waits
instead."""

LATE_TOLERANCE = 1.25
"""A running prompt is aborted if it is predicted to need this many times its remaining time."""


@dataclass(frozen=True)
class ScoreResult:
    """The result of a job."""

    importance: np.ndarray | None = None  # float32 [num_prompt_tokens]; None if it failed.
    num_read: int = 0  # Prompt tokens that the draft read for it.
    error: str | None = None  # Why it failed, None if it did not.
    is_late: bool = False  # Whether deadline_s cannot be met.
    is_too_slow: bool = False  # Whether it takes longer than the plan saves.


PublishScore = Callable[[str, ScoreResult], None]


@dataclass(slots=True, eq=False)
class ScoreJob:
    """A prompt being scored."""

    id: str  # Unique key of the job.
    request: ScoreRequest  # The prompt.
    key: PromptKey  # Its cache key.
    num_bytes: int  # Bytes of its cache at the end.
    todo: list[Boundary]  # Boundaries left to compute, the next one first.
    token: mx.array  # int32 [1, 1], input of the next look-ahead step; first the prompt's last token.
    until_s: float  # When it must be done, on the scorer's clock.
    limit_s: float  # Seconds that it may take in all.
    digest: str  # Digest of its key; equal prompts are scored once.
    cache: SequenceCache = field(default_factory=list)  # The draft's cache, empty before it begins.
    done: int = 0  # Prompt tokens in the cache.
    num_reused: int = 0  # Prompt tokens that were restored from a snapshot.
    looked: list[list[mx.array]] = field(default_factory=list)  # Results of the look-ahead steps, for Draft.observe.
    looking_s: float = 0.0  # Seconds of the look-ahead steps so far.
    stored: list[str] = field(default_factory=list)  # Digests of the snapshots that it has stored.


def load_scorer(config: SpecPrefillConfig, draft: EngineConfig, publish: PublishScore) -> "Scorer":
    """Load the draft on the calling thread, and probe its speed.

    Raises:
        EngineFailed: It cannot be loaded or cannot score.
    """
    scorer = Scorer(load_draft(draft), config, publish)
    with StartPhase("compiling"):
        scorer.probe()
    return scorer


class Scorer:
    """Runs the jobs on the device thread.

    Args:
        draft: The draft model.
        config: Options of sparse prefill.
        publish: Receives each job's outcome, on the device thread.
        clock: Returns monotonic seconds.

    Attributes:
        memory: Bytes by purpose, after the last step.
    """

    def __init__(
        self,
        draft: Draft,
        config: SpecPrefillConfig,
        publish: PublishScore,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._draft = draft
        self._config = config
        self._publish = publish
        self._clock = clock
        self._pace = Pace()
        self._look_s = 0.0  # moving average per look-ahead step
        self._running: deque[ScoreJob] = deque()  # in the order of their turns
        self._waiting: deque[ScoreJob] = deque()
        self._reuse = DraftReuse(draft)
        self.device = str(mx.default_device())
        self.limits = Limits(
            draft.vocab_size,
            draft.max_context_tokens,
            config.lookahead,
            draft.bytes_per_token,
            draft.state_bytes,
            _budget(config, draft),
        )
        self._account()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def probe(self) -> None:
        """Read a short prompt, so that a draft that is far too slow refuses the first prompt, too.

        The first chunk compiles kernels and is not timed.
        """
        cache, done, end = self._draft.make_cache(), 0, min(sum(PROBE_TOKENS), self.limits.max_prompt_tokens)
        began_s = self._clock()
        for i, num_tokens in enumerate(PROBE_TOKENS):
            if done + num_tokens > end or (i > 1 and self._clock() - began_s > MAX_PROBE_S):
                break
            chunk_began_s = self._clock()
            self._draft.extend(np.zeros(num_tokens, np.int32), done, cache, end)
            done += num_tokens
            if i:
                self._pace.expect(num_tokens, self._clock() - chunk_began_s)
        cache.clear()
        mx.clear_cache()

    def add(self, job_id: str, request: ScoreRequest) -> None:
        """Queue a request that `limits` accepts.

        A prompt that was scored recently is published at once, and so is the refusal of one that would be late.
        """
        key = PromptKey(self._draft.fingerprint, request.tenant, np.ascontiguousarray(request.token_ids, np.int32))
        if (importance := self._reuse.importance(key)) is not None:
            self._publish(job_id, ScoreResult(importance))
            return
        num_bytes, last = self.limits.num_bytes(len(key)), mx.array(key.token_ids[None, -1:])
        limit_s = self._config.deadline_s if request.limit_s is None else min(request.limit_s, self._config.deadline_s)
        until_s = self._clock() + limit_s
        wanted = [*request.boundaries, Boundary("prompt", len(key) - 1)]
        todo = choose_boundaries(wanted, key, MIN_TOKENS)
        job = ScoreJob(job_id, request, key, num_bytes, todo, last, until_s, limit_s, key.digest())
        prefix = self._reuse.touch(key, len(key) - 1)
        job.done = 0 if prefix is None else prefix.num_tokens
        to_read = {other.digest: other for other in (job, *self._waiting, *self._running)}  # the same prompt but once
        total_s = sum(map(self._seconds_left, to_read.values()))
        if total_s > limit_s:
            if not self.has_work:  # else the prompts in progress are measured
                self._pace.lower()
                self._look_s *= RETRY_FADE
            self._publish(job_id, self._late(job, total_s, f"with {len(to_read) - 1} other prompts in progress"))
        else:
            self._waiting.append(job)

    def abort(self, job_id: str) -> None:
        """Abort a job: its cache is freed, and nothing is published."""
        self._running = deque(job for job in self._running if job.id != job_id)
        self._waiting = deque(job for job in self._waiting if job.id != job_id)
        self._account()

    def step(self) -> None:
        """Compute one chunk or one look-ahead token of one job."""
        self._admit()
        self._give_up_late()
        if self._running:
            self._take_turn()
        self._account()

    def close(self) -> None:
        """Free everything on the device thread, which must not use MLX afterwards."""
        self._running.clear()
        self._waiting.clear()
        self._reuse.clear()
        del self._draft, self._reuse
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()

    def _account(self) -> None:
        """Limit snapshots to half of the budget, and to what the jobs leave of it; update `memory`."""
        job_bytes = sum(job.num_bytes for job in self._running)
        self._reuse.limit(min(self.limits.budget // 2, self.limits.budget - job_bytes))
        self.memory = memory.usage() | {
            "weights_bytes": self._draft.num_weight_bytes,
            "budget_bytes": self.limits.budget,
            "job_bytes": job_bytes,
            "snapshot_bytes": self._reuse.num_bytes,
        }

    def _admit(self) -> None:
        """Start queued jobs in order: none overtakes a larger one.

        A job whose prompt is being scored already waits for that result.
        """
        free = self.limits.budget - sum(job.num_bytes for job in self._running)
        for job in list(self._waiting):
            if len(self._running) == self._config.max_running or job.num_bytes > free:
                break
            if any(job.digest == other.digest for other in self._running):
                continue
            self._waiting.remove(job)
            free -= job.num_bytes
            self._reuse.touch(job.key, len(job.key) - 1)
            self._running.append(job)
        self._account()

    def _seconds_left(self, job: ScoreJob) -> float:
        to_look = self._config.lookahead - len(job.looked)
        return self._pace.seconds(job.done, len(job.key) - 1) + self._look_s * to_look

    def _late(self, job: ScoreJob, seconds: float, beside: str) -> ScoreResult:
        error = f"scoring {len(job.key)} tokens would take about {seconds:.3g} s {beside}"
        if job.limit_s < self._config.deadline_s:
            return ScoreResult(error=f"{error}; the plan would save only {job.limit_s:.3g} s", is_too_slow=True)
        return ScoreResult(error=f"{error}; the limit is {self._config.deadline_s:g} s (deadline_s)", is_late=True)

    def _give_up_late(self) -> None:
        now = self._clock()
        for job in list(self._running):
            left_s, needed_s = job.until_s - now, self._seconds_left(job)
            if needed_s > max(0.0, left_s) * LATE_TOLERANCE:
                self._running.remove(job)
                spent_s = job.limit_s - left_s
                self._publish(job.id, self._late(job, spent_s + needed_s, "at the current pace"))

    def _next(self) -> ScoreJob:
        """Return the job whose turn it is, or one that is in danger of being late."""
        now = self._clock()
        to_spare = [(job.until_s - now - self._seconds_left(job), i) for i, job in enumerate(self._running)]
        least_s, index = min(to_spare)
        return self._running[index if least_s < URGENT * self._config.deadline_s else 0]

    def _take_turn(self) -> None:
        job = self._next()
        try:
            outcome = self._advance(job)
        except Exception as error:
            named = {"request_id": job.request.request_id}
            log.exception("prompt %s could not be scored", job.request.request_id, extra=named)
            job.cache.clear()  # the traceback keeps the job alive
            for digest in job.stored:
                self._reuse.forget(digest)
            outcome = ScoreResult(error=f"{type(error).__name__}: {error}")
        self._running.remove(job)
        if outcome is None:
            self._running.append(job)
        else:
            self._publish(job.id, outcome)

    def _advance(self, job: ScoreJob) -> ScoreResult | None:
        """Compute one step of the job; return its outcome after the last one, None before."""
        if not job.cache:
            if (known := self._reuse.importance(job.key)) is not None:  # scored for an equal prompt meanwhile
                return ScoreResult(known)
            self._begin(job)
        if job.done < len(job.key) - 1:
            self._read_chunk(job)
            return None
        return self._look_ahead(job)

    def _begin(self, job: ScoreJob) -> None:
        job.cache = self._draft.make_cache()
        job.done = job.num_reused = self._reuse.restore(job.key, job.cache, len(job.key) + self._config.lookahead)
        job.todo = [boundary for boundary in job.todo if boundary.num_tokens >= job.done + MIN_TOKENS]

    def _read_chunk(self, job: ScoreJob) -> None:
        """Read the next chunk. Chunks end at boundaries, and before the last token."""
        until = job.todo[0].num_tokens if job.todo else len(job.key) - 1
        end = min(job.done + self._draft.chunk_tokens(job.done, self._config.chunk_size), until)
        num_slots, began_s = len(job.key) + self._config.lookahead, self._clock()
        self._draft.extend(job.key.token_ids[job.done : end], job.done, job.cache, num_slots)
        if end - job.done >= MIN_MEASURED_TOKENS:
            self._pace.record(job.done, end, self._clock() - began_s)
        job.done = end
        if job.todo and end == until:
            boundary = job.todo.pop(0)
            digest = self._reuse.store(job.key.prefix(end), boundary.kind, job.cache)
            job.stored += [] if digest is None else [digest]

    def _look_ahead(self, job: ScoreJob) -> ScoreResult | None:
        """Launch a step and read the previous step's token while it runs; wait for all steps after the last."""
        num_prompt, began_s = len(job.key), self._clock()
        before, is_first = job.token, not job.looked
        if job.num_bytes > MAX_COPIED_BYTES:
            mx.eval(before)
        job.token, states = self._draft.look_ahead(before, job.cache)
        if not is_first and int(np.array(before).item()) in self._draft.stop_token_ids:
            importance = self._observed(job)
        else:
            job.looked.append(states)
            is_last = len(job.looked) == self._config.lookahead
            importance = self._observed(job) if is_last else None
        job.looking_s += self._clock() - began_s
        if importance is None:
            return None
        seconds = job.looking_s / len(job.looked)
        self._look_s += LOOK_WEIGHT * (seconds - self._look_s) if self._look_s else seconds
        if not np.isfinite(importance).any():
            raise EngineFailed(f"all scores of the {num_prompt} tokens are NaN or inf")
        self._reuse.remember(job.key, importance)
        return ScoreResult(importance, num_prompt - job.num_reused)

    def _observed(self, job: ScoreJob) -> np.ndarray:
        """Return the mean importance over all steps; waits for the device."""
        num_prompt = len(job.key)
        return np.array(self._draft.observe(job.looked, num_prompt - 1, job.cache, num_prompt))


def _budget(config: SpecPrefillConfig, draft: Draft) -> int:
    """Return the bytes that the weights leave for caches.

    Raises:
        EngineFailed: The weights leave nothing.
    """
    share = DEVICE_SHARE if config.memory_share is None else config.memory_share
    device_bytes, weights = memory.device_bytes(), draft.num_weight_bytes
    budget = int(share * device_bytes) - weights
    if budget <= 0:
        raise EngineFailed(
            f"memory_share: {share} of the device's {device_bytes} bytes is less than the draft's weights, "
            f"{weights} bytes"
        )
    return budget
