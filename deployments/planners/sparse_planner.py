"""SparsePlanner: decides which prompts are prefilled sparsely, gets their plans, and reports why others are dense."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from deployments.calls.scorer_client import NoPlan, ScorerClient
from deployments.requests import ChatRequest, SpecPrefillReport
from engine.core.spec_prefill.plan import KEPT_CHUNK_TOKENS, ScoreRequest, find_anchors, why_unfit
from engine.errors import InvalidRequest
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, PrefillCost, SparsePlan
from engine.spec_prefill_config import SpecPrefillConfig

log = logging.getLogger("ray.serve")

MIN_CHUNKS = 4
"""Least chunks to select from; the first and the last are always kept."""

MIN_LEFT_OUT = 0.1
"""Least fraction of the scored tokens that a plan must leave out. Less would cost quality and save next to nothing."""


@dataclass(frozen=True)
class Dense:
    """The intended outcome of planning that a prompt is prefilled densely; a failure is a `NoPlan`."""

    category: str
    """Key of the counters in /v1/status."""
    reason: str
    """For the client."""
    is_reported: bool = True
    """Whether the usage and the counters mention it: not if nothing about the request asks for a sparse prefill."""


@dataclass(frozen=True)
class PromptFacts:
    """Facts about the tokenizer that anchors depend on."""

    control_token_ids: Set[int]
    """Ids of the added tokens that structure a prompt."""
    image_token_id: int | None = None
    """Placeholder of an image; None for a text model."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> "PromptFacts":
        return cls(tokenizer.control_token_ids, tokenizer.image_token_id)


class SparsePlanner:
    """Plans sparse prefill. Without a scorer, or with `enabled` false, every prompt is dense.

    Args:
        config: Settings of sparse prefill.
        facts: The target model's tokenizer.
        engine: Handle of the engines.
        scorer: Handle of the scorers.
    """

    def __init__(
        self,
        config: SpecPrefillConfig,
        facts: PromptFacts,
        engine: DeploymentHandle | None = None,
        scorer: DeploymentHandle | None = None,
    ):
        self._client: ScorerClient | None = None
        if config.enabled and engine is not None and scorer is not None:
            self._client = ScorerClient(engine, scorer)
        self._config = config
        self._facts = facts
        self._num_sparse = self._num_replanned = 0
        self._dense: Counter[str] = Counter()

    async def plan(
        self, request: ChatRequest, engine_request: EngineRequest, engine_id: str = ""
    ) -> tuple[EngineRequest, SpecPrefillReport | None]:
        """Add a sparse plan to a request if one is wanted and can be had; any failure leaves it dense.

        Args:
            request: The request.
            engine_request: Its prompt.
            engine_id: The engine that will get it; '' without Ray.

        Returns:
            The request, and a report; no report if neither the request nor the configuration asks for a plan.

        Raises:
            InvalidRequest: The request asks for sparse prefill, but the configuration disables it.
        """
        if self._client is None:
            _refuse_to_ask(request)
            return engine_request, None
        if request.spec_prefill is False:
            return engine_request, None
        is_asked = request.spec_prefill or request.spec_prefill_keep is not None
        if not is_asked and len(engine_request.token_ids) < self._config.threshold_tokens:
            return engine_request, None
        planning = SparsePlanning(self._config, self._facts, self._client, request, engine_request, engine_id)
        try:
            outcome = await planning.plan()
        except NoPlan as failure:
            return engine_request, self._densely(planning, failure)
        except Exception as error:
            return engine_request, self._densely(planning, NoPlan("failed", "failed", is_failure=True), error)
        finally:
            self._num_replanned += planning.is_replanned
        if isinstance(outcome, Dense):
            return engine_request, self._densely(planning, outcome) if outcome.is_reported else None
        self._num_sparse += 1
        return replace(engine_request, sparse=outcome), planning.report()

    def status(self) -> dict[str, Any] | None:
        """Return counts of prompts since the start; None if the configuration disables sparse prefill.

        `sparse`: prefilled sparsely; `replanned`: scored a second time because the cached prefix had changed; `dense`:
        prefilled densely, by category of the reason.
        """
        if self._client is None:
            return None
        return {"sparse": self._num_sparse, "replanned": self._num_replanned, "dense": dict(self._dense)}

    def _densely(
        self, planning: "SparsePlanning", why: Dense | NoPlan, unforeseen: Exception | None = None
    ) -> SpecPrefillReport:
        self._dense[why.category] += 1
        is_failure, cause = (why.is_failure, why.__cause__) if isinstance(why, NoPlan) else (False, None)
        log.log(
            logging.WARNING if is_failure else logging.INFO,
            "request %s: the prompt is prefilled densely: %s%s",
            planning.request_id,
            why.reason,
            f" ({type(cause).__name__}: {cause})" if cause is not None else "",
            exc_info=unforeseen,
        )
        return planning.report(why.reason)


class SparsePlanning:
    """The planning of one prompt.

    Attributes:
        is_replanned: Whether the prompt was scored a second time because the cached prefix had changed.
    """

    def __init__(
        self,
        config: SpecPrefillConfig,
        facts: PromptFacts,
        client: ScorerClient,
        request: ChatRequest,
        engine_request: EngineRequest,
        engine_id: str,
    ):
        self.request_id = engine_request.request_id
        self.is_replanned = False
        self._config = config
        self._facts = facts
        self._client = client
        self._asked = request.spec_prefill is True
        self._has_tools = _has_tools(request)
        self._asked_keep = request.spec_prefill_keep is not None
        self._keep = config.keep if request.spec_prefill_keep is None else request.spec_prefill_keep
        self._request = engine_request
        self._engine_id = engine_id
        self._num_system = max((b.num_tokens for b in engine_request.boundaries if b.kind == "system"), default=0)
        self._num_scored = 0
        self._scorer_node: str | None = None
        self._began = time.monotonic()

    async def plan(self) -> SparsePlan | Dense:
        """Get a plan within deadline_s. Raises NoPlan."""
        dense = self._intended() or self._too_few(self._num_system)
        if dense is not None:
            return dense
        deadline = asyncio.timeout(self._config.deadline_s)
        try:
            async with deadline:
                return await self._plan()
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"deadline: no plan within {self._config.deadline_s:g} s"
            raise NoPlan("deadline", reason, is_failure=True) from None

    def report(self, dense_because: str | None = None) -> SpecPrefillReport:
        return SpecPrefillReport(self._num_scored, time.monotonic() - self._began, dense_because)

    def _intended(self) -> Dense | None:
        """Return why the prompt is dense by what is known without a call to another replica; None if it is not."""
        request, limit = self._request, self._config.max_tokens_scored
        num_tokens = len(request.token_ids)
        if (dense := self._below_threshold(num_tokens, "tokens")) is not None:
            return dense
        if request.prompt_logprobs is not None:
            return Dense("logprobs", "the logprobs of the prompt's tokens need all of them")
        if not self._asked:
            special = {"tools": self._has_tools, "grammar": request.grammar is not None, "media": bool(request.images)}
            if reason := next((name for name, is_there in special.items() if is_there), None):
                return Dense(reason, reason)
        if self._keep >= 1:
            return Dense("keep", "keep is 1")
        if num_tokens > limit:
            return Dense("too_long", f"too long: the prompt has {num_tokens} tokens, the limit is {limit}")
        return None

    def _too_few(self, num_dense: int, is_scored: bool = False) -> Dense | None:
        """Return why too few tokens follow the dense prefix for a sparse prefill; None if there are enough.

        Args:
            num_dense: Tokens at the start of the prompt that are computed in any case.
            is_scored: Whether the prompt has been scored, so that only its cached prefix can have become longer.
        """
        num_behind = len(self._request.token_ids) - num_dense
        threshold, least = self._config.threshold_tokens, MIN_CHUNKS * KEPT_CHUNK_TOKENS
        if (dense := self._below_threshold(num_behind, "tokens after the dense prefix")) is not None:
            after = f"{num_behind} tokens after the dense prefix of {num_dense}"
            return Dense("cached", f"cached: {after}, the threshold is {threshold}") if is_scored else dense
        if num_behind < least:
            reason = f"too short: {num_behind} tokens after the dense prefix, the minimum is {least}"
            return Dense("too_short", reason)
        return None

    def _below_threshold(self, num_tokens: int, what: str) -> Dense | None:
        """Compare with threshold_tokens, of which only a request with `specprefill_keep_pct` is told."""
        threshold = self._config.threshold_tokens
        if self._asked or num_tokens >= threshold:
            return None
        reason = f"below threshold_tokens: {num_tokens} {what}, the threshold is {threshold}"
        return Dense("below_threshold", reason, is_reported=self._asked_keep)

    async def _plan(self) -> SparsePlan | Dense:
        """Score the prompt, and once more if its cached prefix has changed meanwhile."""
        plan = None
        while True:
            found = await self._client.cached_prefix(self._request, self._engine_id)
            if found.no_sparse is not None:
                return Dense("unsupported", found.no_sparse)
            num_dense = max(found.num_tokens, self._num_system)  # so that a snapshot of the system part can be stored
            if (dense := self._too_few(num_dense, is_scored=plan is not None)) is not None:
                return dense
            if plan is not None and plan.num_dense == num_dense:
                return plan
            self.is_replanned = plan is not None
            plan = await self._score(num_dense, found.cost)
            if (dense := self._nothing_skipped(plan)) is not None:
                return dense
            if self.is_replanned:
                return plan

    async def _score(self, num_dense: int, cost: PrefillCost | None) -> SparsePlan:
        """Get a plan from a scorer. Raises NoPlan.

        Args:
            num_dense: Tokens of the dense prefix.
            cost: The engine's cost of prefill, if it is known.
        """
        request = self._request
        score_request = ScoreRequest(
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_dense=num_dense,
            anchors=self._anchors(num_dense),
            keep=self._keep,
            boundaries=request.boundaries,
            tenant=request.tenant,
            limit_s=None if self._asked or cost is None else self._saved_s(cost, num_dense),
        )
        scored, self._scorer_node = await self._client.score(score_request, self._scorer_node)
        self._num_scored += scored.num_scored
        plan = scored.plan
        unfit = why_unfit(plan, request.token_ids)
        if unfit is None and plan.num_dense != num_dense:
            unfit = f"it has {plan.num_dense} dense tokens instead of {num_dense}"
        if unfit is not None:
            raise NoPlan("unfit", f"the plan is invalid: {unfit}", is_failure=True)
        return plan

    def _saved_s(self, cost: PrefillCost, num_dense: int) -> float:
        """Predict the seconds that the engine saves by computing only the kept tokens."""
        num_tokens = len(self._request.token_ids)
        num_kept = num_dense + int(self._keep * (num_tokens - num_dense))
        return cost.prompt_s(num_dense, num_tokens) - cost.prompt_s(num_dense, num_kept)

    def _nothing_skipped(self, plan: SparsePlan) -> Dense | None:
        num_tokens = len(self._request.token_ids)
        num_left_out, num_behind = num_tokens - len(plan.positions), num_tokens - plan.num_dense
        if num_left_out / num_behind >= MIN_LEFT_OUT:
            return None
        least = f"the minimum is {MIN_LEFT_OUT:.0%}"
        return Dense("nothing", f"too few tokens to skip: {num_left_out} of {num_behind}, {least}")

    def _anchors(self, num_dense: int) -> np.ndarray:
        request, image_token_id = self._request, self._facts.image_token_id
        media = np.flatnonzero(request.token_ids == (-1 if image_token_id is None else image_token_id))
        control = sorted(self._facts.control_token_ids)
        anchors = find_anchors(request.token_ids, control, request.boundaries, media)
        return anchors[anchors >= num_dense]


def _has_tools(request: ChatRequest) -> bool:
    """Tell whether the request offers tools or its conversation has tool calls."""
    in_use = any(message["role"] == "tool" or message.get("tool_calls") for message in request.messages)
    return in_use or bool(request.tools)


def _refuse_to_ask(request: ChatRequest) -> None:
    """Raise InvalidRequest if the request asks for sparse prefill, which the configuration disables."""
    asked = {"specprefill": request.spec_prefill or None, "specprefill_keep_pct": request.spec_prefill_keep}
    for field, value in asked.items():
        if value is not None:
            shown = "true" if value is True else value
            raise InvalidRequest(f"`{field}` is {shown}, but this server has spec_prefill.enabled: false", field)
