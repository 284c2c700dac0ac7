"""The draft scorer's asyncio interface: takes long prompts, returns sparse plans."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from engine import retry_after
from engine.async_device_thread import AsyncDeviceThread, type_and_message
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import Scored, ScorerCounters, ScoreRequest, ScorerStatus, make_plan
from engine.errors import EngineFailed, InvalidRequest, OrchardError, Overloaded, ScoringTooSlow
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer_match import why_different
from engine.spec_prefill_config import MIN_KEEP, SpecPrefillConfig
from engine.worker.spec_prefill.draft import draft_engine_config
from engine.worker.spec_prefill.scorer import PublishScore, Scorer, ScoreResult, load_scorer

STEP_TIMEOUT_S = 120.0
"""Seconds of a step after which the scorer is unhealthy."""

ScorerFactory = Callable[[SpecPrefillConfig, EngineConfig, PublishScore], Scorer]
"""Creates the scorer on the device thread; the second argument configures how the draft is loaded."""


class AsyncDraftScorer:
    """Scores prompts on a device thread of its own. Belongs to the event loop that is running when it is constructed.

    Loading starts at once.

    Args:
        config: Options of sparse prefill.
        target: The engine whose prompts are scored; its tokenizer must be the draft's.
        beside_engine: Whether an engine in another process uses the same GPU, if there is one.
        make_scorer: Creates the scorer.
    """

    def __init__(
        self,
        config: SpecPrefillConfig,
        target: EngineConfig,
        beside_engine: bool = False,
        make_scorer: ScorerFactory = load_scorer,
    ):
        self.config = config
        self._target = target
        self._beside_engine = beside_engine
        self._make_scorer = make_scorer
        self._open: dict[str, asyncio.Future[tuple[np.ndarray, int]]] = {}  # by unique key
        self._serial = itertools.count()
        self._counts = ScorerCounters()
        self._thread = AsyncDeviceThread("the scorer", self._make, self._end_prompts, describe=described)
        self._thread.start()

    async def wait_ready(self) -> None:
        """Wait until the draft can score.

        Raises:
            EngineFailed: It never will; the message has the reason.
        """
        await self._thread.wait_ready()

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a prompt and return the plan of tokens to compute. Cancelling stops the draft before its next chunk.

        Raises:
            Overloaded: max_running + max_queue prompts are open, or deadline_s cannot be met.
            ScoringTooSlow: Scoring would take longer than the request's limit_s.
            InvalidRequest: This draft cannot score the prompt.
            EngineFailed: The scorer is not ready, failed, or was shut down.
        """
        began_s = time.perf_counter()
        self._check(request)
        key = f"{request.request_id}#{next(self._serial)}"
        outcome = self._open[key] = asyncio.get_running_loop().create_future()
        self._thread.submit(lambda scorer: scorer.add(key, request))
        try:
            importance, num_read = await outcome
            plan = await asyncio.to_thread(make_plan, request, importance)
        except asyncio.CancelledError:
            self._counts.num_cancelled += 1
            raise
        except (Overloaded, ScoringTooSlow):
            self._counts.num_refused += 1
            raise
        except Exception:
            self._counts.num_failed += 1
            raise
        finally:
            del self._open[key]
            if outcome.cancelled():
                self._thread.submit(lambda scorer: scorer.abort(key))
        self._counts.num_scored += 1
        self._counts.num_scored_tokens += num_read
        self._counts.num_reused_tokens += len(request.token_ids) - num_read
        return Scored(plan, num_read, time.perf_counter() - began_s)

    def status(self) -> ScorerStatus:
        """Return the scorer's state and figures."""
        scorer, error = self._thread.worker, self._thread.error
        draft_model = self.config.draft_model or "demo"
        status = ScorerStatus(state=self._state, draft_model=draft_model, error=error, **asdict(self._counts))
        if scorer is None:
            return status
        return replace(
            status,
            device=scorer.device,
            max_prompt_tokens=min(self.config.max_tokens_scored, scorer.limits.max_prompt_tokens),
            num_running=scorer.num_running,
            num_waiting=scorer.num_waiting,
            memory=scorer.memory,
        )

    def check_health(self) -> None:
        """Check that a scorer that was ready still works.

        A draft that could not be loaded is not unhealthy: retrying would not help.

        Raises:
            EngineFailed: It failed, was stopped, or its device hangs.
        """
        if self._state in ("failed", "stopped"):
            raise EngineFailed(self._thread.error or self._state)
        age_s = self._thread.step_age_s
        if age_s > STEP_TIMEOUT_S:
            raise EngineFailed(f"a step has been running for {age_s:.0f} s; the limit is {STEP_TIMEOUT_S:.0f} s")

    async def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop after the running step; open prompts fail."""
        await self._thread.shutdown(timeout_s)

    @property
    def _state(self) -> str:
        has_failed_to_load = self._thread.state == "failed" and not self._thread.was_ready
        return "unavailable" if has_failed_to_load else self._thread.state

    def _check(self, request: ScoreRequest) -> None:
        """Check a request against the limits. Raises what `score` raises."""
        if (reason := self._thread.unavailable_reason) is not None:
            raise EngineFailed(reason)
        scorer = self._thread.worker
        assert scorer is not None
        limit = self.config.max_running + self.config.max_queue
        try:
            check_request(request, self.config.max_tokens_scored)
            scorer.limits.check(request)
            if len(self._open) >= limit:
                raise Overloaded(
                    f"{len(self._open)} prompts are being scored or queued; the limit is {limit} "
                    f"(max_running {self.config.max_running} + max_queue {self.config.max_queue})",
                    retry_after_s=retry_after.SCORER_BUSY_S,
                )
        except OrchardError:
            self._counts.num_refused += 1
            raise

    # On the device thread.

    def _make(self) -> Scorer:
        draft = draft_engine_config(self.config, choose_device(self.config, self._beside_engine))
        target_dir, draft_dir = (
            resolve_checkpoint(model.model, model.revision, weights=False) for model in (self._target, draft)
        )
        if (difference := why_different(target_dir, draft_dir)) is not None:
            raise EngineFailed(f"the draft model cannot score prompts of {self._target.model}: {difference}")
        return self._make_scorer(self.config, draft, self._publish)

    def _publish(self, key: str, outcome: ScoreResult) -> None:
        self._thread.call_soon(self._deliver, key, outcome)

    # On the event loop.

    def _deliver(self, key: str, outcome: ScoreResult) -> None:
        future = self._open.get(key)
        if future is None or future.done():
            return
        if outcome.importance is not None:
            future.set_result((outcome.importance, outcome.num_read))
        elif outcome.is_too_slow:
            future.set_exception(ScoringTooSlow(outcome.error or ""))
        elif outcome.is_late:
            future.set_exception(Overloaded(outcome.error or "", retry_after_s=retry_after.SCORER_BUSY_S))
        else:
            future.set_exception(EngineFailed(outcome.error))

    def _end_prompts(self, error: str) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineFailed(error))


def choose_device(config: SpecPrefillConfig, beside_engine: bool) -> str:
    """Return auto, cpu or gpu, as the loader takes them.

    Raises:
        EngineFailed: A GPU would be shared with an engine without memory_share.
    """
    if beside_engine and config.device == "gpu" and config.memory_share is None:
        raise EngineFailed(
            "device: gpu is configured for the draft, but the engine uses the same GPU from another process; neither "
            "sees the other's memory: set memory_share to the draft's share of the GPU's memory, or device to cpu"
        )
    return "cpu" if beside_engine and config.device == "auto" else config.device


def check_request(request: ScoreRequest, max_tokens: int) -> None:
    """Check a request against limits that hold for every draft.

    Raises:
        InvalidRequest: A field is out of range, or the prompt is too long.
    """
    num_tokens = len(request.token_ids)
    if not 1 <= num_tokens <= max_tokens:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; it must have 1 to {max_tokens} (max_tokens_scored) to be scored",
            "messages",
        )
    if not 0 <= request.num_dense <= num_tokens:
        raise InvalidRequest(f"num_dense is {request.num_dense}; it must be between 0 and {num_tokens}", "num_dense")
    if not MIN_KEEP <= request.keep <= 1:
        raise InvalidRequest(f"keep is {request.keep}; it must be between {MIN_KEEP} and 1", "keep")
    for anchor in (int(request.anchors.min()), int(request.anchors.max())) if len(request.anchors) else ():
        if not 0 <= anchor < num_tokens:
            raise InvalidRequest(f"an anchor is at {anchor}; it must be between 0 and {num_tokens - 1}", "anchors")


def described(error: BaseException) -> str:
    """Return the message of one of our errors, else type and message."""
    return str(error) if isinstance(error, OrchardError) else type_and_message(error)
