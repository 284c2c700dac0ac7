"""Scores prompts in turns on the device thread: one chunk of one prompt, or one look-ahead token, per step.

A plan that comes too late is work for nothing, and so is one that saves less time than it takes. So a prompt is
refused when the draft, at the pace that it has shown, could not read all that is open within deadline_s, or within what
the plan saves; it is given up when it turns out so; and a prompt in danger of being late goes first.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.config import BoundaryKind, EngineConfig, SpecPrefillConfig
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.spec_prefill.pace import Pace
from engine.core.spec_prefill.plan import ScoreRequest
from engine.protocol import Boundary, EngineFailed
from engine.worker import memory
from engine.worker.kv_cache import RowCache
from engine.worker.spec_prefill.draft import Draft, load_draft
from engine.worker.spec_prefill.limits import Limits
from engine.worker.spec_prefill.reuse import DraftReuse

log = logging.getLogger("orchard.scorer")

DEVICE_SHARE = 0.1
"""Of the device's memory, for weights and caches, where the configuration does not say."""

MIN_MEASURED_TOKENS = 64
"""A forward of fewer says little: it takes its time in any case."""

MIN_TOKENS = 16
"""A snapshot is taken where it saves at least so many tokens over the one before."""

URGENT = 0.2
"""Part of deadline_s: with less time to spare a prompt goes first."""

LOOK_WEIGHT = 0.3
"""Weight of one more prompt in the moving average of the seconds of a step that looks ahead."""

MAX_COPIED_BYTES = 2**28
"""A step that is launched while the one before runs copies the cache that it writes to: with a larger one it waits."""

BENEFIT_OF_DOUBT = 1.25
"""A prompt that has begun is given up when it would take so many times what is left."""


@dataclass(frozen=True)
class Outcome:
    """Of a job. importance: float32 [num_prompt_tokens]; None when it failed, error tells why. num_read: tokens of the
    prompt that the draft has read for it. is_late: it could not have been done in time; is_too_slow: or not in the
    time that the plan saves."""

    importance: np.ndarray | None = None
    num_read: int = 0
    error: str | None = None
    is_late: bool = False
    is_too_slow: bool = False


Publish = Callable[[str, Outcome], None]


@dataclass(slots=True, eq=False)
class Job:
    """A prompt on its way. num_bytes: of its cache when it is done. todo: boundaries in front of it, the next one
    first. done: tokens of the prompt that need not be read any more, num_reused of them read for others. token: int32
    [1, 1], the next that a step ahead reads, first the prompt's last; looked: what each step so far has left for
    Draft.observe; looking_s: how long they have taken. stored: digests of the snapshots that it has left. until_s: when
    it must be done, by the scorer's clock; limit_s: how long it may take in all.
    """

    id: str
    request: ScoreRequest
    key: PromptKey
    num_bytes: int
    todo: list[Boundary]
    token: mx.array
    until_s: float
    limit_s: float
    digest: str
    cache: RowCache = field(default_factory=list)
    done: int = 0
    num_reused: int = 0
    looked: list[list[mx.array]] = field(default_factory=list)
    looking_s: float = 0.0
    stored: list[str] = field(default_factory=list)


def load_scorer(config: SpecPrefillConfig, draft: EngineConfig, publish: Publish) -> "Scorer":
    """Loads the draft on the calling thread. Raises EngineFailed with the reason."""
    return Scorer(load_draft(draft), config, publish)


class Scorer:
    """`publish` gets each job's outcome, on the device thread. memory: bytes, as they were after the last step."""

    def __init__(
        self,
        draft: Draft,
        config: SpecPrefillConfig,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._draft = draft
        self._config = config
        self._publish = publish
        self._clock = clock
        self._pace = Pace()
        self._look_s = 0.0  # of a step that looks ahead, as the last ones took
        self._running: deque[Job] = deque()  # whose turn is next first
        self._waiting: deque[Job] = deque()
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

    def add(self, job_id: str, request: ScoreRequest) -> None:
        """A request that `limits` has let pass. One that has been scored lately is published at once, and so is one
        that would be late."""
        key = PromptKey(self._draft.fingerprint, request.tenant, np.ascontiguousarray(request.token_ids, np.int32))
        if (importance := self._reuse.importance(key)) is not None:
            self._publish(job_id, Outcome(importance))
            return
        num_bytes, last = self.limits.num_bytes(len(key)), mx.array(key.token_ids[None, -1:])
        limit_s = self._config.deadline_s if request.limit_s is None else min(request.limit_s, self._config.deadline_s)
        until_s = self._clock() + limit_s
        job = Job(job_id, request, key, num_bytes, boundaries(request), last, until_s, limit_s, key.digest())
        prefix = self._reuse.touch(key, len(key) - 1)
        job.done = 0 if prefix is None else prefix.num_tokens
        to_read = {other.digest: other for other in (job, *self._waiting, *self._running)}  # the same prompt but once
        total_s = sum(map(self._seconds_left, to_read.values()))
        if total_s > limit_s:
            self._publish(job_id, self._late(job, total_s, f"beside {len(to_read) - 1} other prompts"))
        else:
            self._waiting.append(job)

    def abort(self, job_id: str) -> None:
        """Nothing is published; its cache is free when this returns."""
        self._running = deque(job for job in self._running if job.id != job_id)
        self._waiting = deque(job for job in self._waiting if job.id != job_id)
        self._account()

    def step(self) -> None:
        self._admit()
        self._give_up_late()
        if self._running:
            self._take_turn()
        self._account()

    def close(self) -> None:
        """Gives everything back, on the thread that took it, which must not use MLX again."""
        self._running.clear()
        self._waiting.clear()
        self._reuse.clear()
        del self._draft, self._reuse
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()

    def _account(self) -> None:
        """Snapshots get half of the budget, and no more than the jobs leave."""
        job_bytes = sum(job.num_bytes for job in self._running)
        self._reuse.limit(min(self.limits.budget // 2, self.limits.budget - job_bytes))
        self.memory = memory.usage() | {
            "weights_bytes": self._draft.num_weight_bytes,
            "budget_bytes": self.limits.budget,
            "job_bytes": job_bytes,
            "snapshot_bytes": self._reuse.num_bytes,
        }

    def _admit(self) -> None:
        """First come, first served: nobody overtakes one that needs more bytes. A prompt that is being scored already
        waits for what comes of it."""
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

    def _seconds_left(self, job: Job) -> float:
        to_look = self._config.lookahead - len(job.looked)
        return self._pace.seconds(job.done, len(job.key) - 1) + self._look_s * to_look

    def _late(self, job: Job, seconds: float, beside: str) -> Outcome:
        error = f"scoring {len(job.key)} tokens would take about {seconds:.3g} s {beside}"
        if job.limit_s < self._config.deadline_s:
            return Outcome(error=f"{error}; the plan would save {job.limit_s:.3g} s", is_too_slow=True)
        return Outcome(error=f"{error}; the limit is {self._config.deadline_s:g} s (deadline_s)", is_late=True)

    def _give_up_late(self) -> None:
        now = self._clock()
        for job in list(self._running):
            left_s, needed_s = job.until_s - now, self._seconds_left(job)
            if needed_s > max(0.0, left_s) * BENEFIT_OF_DOUBT:
                self._running.remove(job)
                spent_s = job.limit_s - left_s
                self._publish(job.id, self._late(job, spent_s + needed_s, "at the pace that it goes"))

    def _next(self) -> Job:
        """In turns, unless somebody is in danger of being late."""
        now = self._clock()
        to_spare = [(job.until_s - now - self._seconds_left(job), i) for i, job in enumerate(self._running)]
        least_s, index = min(to_spare)
        return self._running[index if least_s < URGENT * self._config.deadline_s else 0]

    def _take_turn(self) -> None:
        job = self._next()
        try:
            outcome = self._advance(job)
        except Exception as error:
            log.exception("prompt %s could not be scored", job.request.request_id)
            job.cache.clear()  # whoever keeps the traceback keeps the job
            for digest in job.stored:
                self._reuse.forget(digest)
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
        self._running.remove(job)
        if outcome is None:
            self._running.append(job)
        else:
            self._publish(job.id, outcome)

    def _advance(self, job: Job) -> Outcome | None:
        """One step of the job; its outcome behind the last one."""
        if not job.cache:
            if (known := self._reuse.importance(job.key)) is not None:  # another has asked for the same meanwhile
                return Outcome(known)
            self._begin(job)
        if job.done < len(job.key) - 1:
            self._read_chunk(job)
            return None
        return self._look_ahead(job)

    def _begin(self, job: Job) -> None:
        job.cache = self._draft.make_cache()
        job.done = job.num_reused = self._reuse.restore(job.key, job.cache, len(job.key) + self._config.lookahead)
        job.todo = [boundary for boundary in job.todo if boundary.num_tokens >= job.done + MIN_TOKENS]

    def _read_chunk(self, job: Job) -> None:
        """Chunks end at boundaries, and in front of the last token."""
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

    def _look_ahead(self, job: Job) -> Outcome | None:
        """Launch a step, and read the token of the one before while it runs; wait for all behind the last."""
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
            raise EngineFailed(f"none of the scores of {num_prompt} tokens is finite")
        self._reuse.remember(job.key, importance)
        return Outcome(importance, num_prompt - job.num_reused)

    def _observed(self, job: Job) -> np.ndarray:
        """The mean over all steps; waits for the device."""
        num_prompt = len(job.key)
        return np.array(self._draft.observe(job.looked, num_prompt - 1, job.cache, num_prompt))


def _budget(config: SpecPrefillConfig, draft: Draft) -> int:
    """What the weights leave. Raises EngineFailed if that is nothing."""
    share = DEVICE_SHARE if config.memory_share is None else config.memory_share
    device_bytes, weights = memory.device_bytes(), draft.num_weight_bytes
    budget = int(share * device_bytes) - weights
    if budget <= 0:
        raise EngineFailed(
            f"memory_share: {share} of the device's {device_bytes} bytes is less than the draft's weights, "
            f"{weights} bytes"
        )
    return budget


def boundaries(request: ScoreRequest) -> list[Boundary]:
    """Where the draft's state is worth keeping, ascending: at the request's boundaries, and in front of the last token.

    Not the end of the prompt instead of the end of its turn: what is between them may be rendered otherwise next time.
    """
    prompt: BoundaryKind = "prompt"
    wanted = [*request.boundaries, Boundary(prompt, len(request.token_ids) - 1)]
    turn = max((boundary.num_tokens for boundary in request.boundaries if boundary.kind == "turn"), default=0)
    found, last = [], 0
    for boundary in sorted(wanted, key=lambda boundary: boundary.num_tokens):
        behind = max(last, turn) if boundary.kind == prompt else last
        if behind + MIN_TOKENS <= boundary.num_tokens < len(request.token_ids):
            found.append(boundary)
            last = boundary.num_tokens
    return found
