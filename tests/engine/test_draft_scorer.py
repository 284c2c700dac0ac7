"""AsyncDraftScorer: plans, limits, cancels, failures, the end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import draft_scorer
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import Scored, ScoreRequest, make_plan, why_unfit
from engine.draft_scorer import AsyncDraftScorer, choose_device
from engine.errors import EngineFailed, InvalidRequest, Overloaded
from engine.processing.tokenizer import ChatTokenizer
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.spec_prefill.draft import load_draft
from engine.worker.spec_prefill.scorer import Scorer, ScoreResult, load_scorer
from tests.support.fake_runner import until

NO_ANCHORS = np.empty(0, np.int32)


def request(num_tokens: int = 300, seed: int = 0, **fields: Any) -> ScoreRequest:
    ids = np.random.default_rng(seed).integers(14, 4000, num_tokens).astype(np.int32)
    return ScoreRequest(f"r{seed}", **{"token_ids": ids, "num_dense": 0, "anchors": NO_ANCHORS, "keep": 0.3} | fields)


def run(test: Callable[[AsyncDraftScorer], Awaitable], make_scorer: Any = load_scorer, **config: Any) -> None:
    """The test with a scorer of the demo model's draft, for at most 20 s."""

    async def main() -> None:
        settings = SpecPrefillConfig.model_validate({"device": "cpu", "chunk_size": 64, **config})
        scorer = AsyncDraftScorer(settings, EngineConfig(), make_scorer=make_scorer)
        await scorer.wait_ready()
        try:
            async with asyncio.timeout(60):
                await test(scorer)
        finally:
            await scorer.shutdown()

    asyncio.run(main())


def unavailable(reason: str, beside_engine: bool = False, target: str = "demo", **config: Any) -> None:
    """It says why it will never score, and is healthy."""

    async def main() -> None:
        settings = SpecPrefillConfig.model_validate({"device": "cpu", **config})
        scorer = AsyncDraftScorer(settings, EngineConfig(model=target), beside_engine)
        for waiting in (scorer.wait_ready(), scorer.wait_ready()):
            with pytest.raises(EngineFailed, match=reason):
                await waiting
        with pytest.raises(EngineFailed, match=reason):
            await scorer.score(request())
        status = scorer.status()
        assert status.state == "unavailable" and status.error is not None and status.num_failed == 0
        scorer.check_health()
        await scorer.shutdown()
        assert scorer.status().state == "unavailable"

    asyncio.run(main())


class SlowScorer(Scorer):
    """Each step takes 20 ms; broken: the next one raises outside of any job."""

    broken = False

    def step(self) -> None:
        time.sleep(0.02)
        if self.broken:
            raise RuntimeError("boom")
        super().step()


def slow(config: SpecPrefillConfig, draft: EngineConfig, publish: Any) -> Scorer:
    return SlowScorer(load_draft(draft), config, publish)


def test_a_plan_fits_its_prompt_and_is_the_same_alone_and_among_other_prompts():
    async def test(scorer: AsyncDraftScorer) -> None:
        requests = [request(200 + 50 * i, i, num_dense=20, anchors=np.array([5, 90], np.int32)) for i in range(4)]
        alone = [await scorer.score(r) for r in requests]
        for r, scored in zip(requests, alone, strict=True):
            assert why_unfit(scored.plan, r.token_ids) is None and scored.plan.num_dense == 20
            assert {*range(20), 90, len(r.token_ids) - 1} <= set(scored.plan.positions.tolist())
            assert scored.num_scored == len(r.token_ids) and 0 < scored.seconds < 20
        fresh = [await scorer.score(request(300, 9)), *await asyncio.gather(*map(scorer.score, requests))]
        assert [f.plan.fingerprint for f in fresh[1:]] == [a.plan.fingerprint for a in alone]
        status = scorer.status()
        assert (status.num_scored, status.num_scored_tokens) == (9, 200 + 250 + 300 + 350 + 300)
        assert status.num_reused_tokens == 200 + 250 + 300 + 350
        assert status.max_prompt_tokens == 32768 - scorer.config.lookahead  # the draft's context, not max_tokens_scored

    run(test)


def test_plans_of_prompts_scored_together_equal_those_scored_alone():
    plans: dict[str, list[Scored]] = {}

    async def one_by_one(scorer: AsyncDraftScorer) -> None:
        plans["alone"] = [await scorer.score(request(300 + i, i)) for i in range(3)]

    async def at_once(scorer: AsyncDraftScorer) -> None:
        plans["together"] = list(await asyncio.gather(*(scorer.score(request(300 + i, i)) for i in range(3))))

    run(one_by_one)
    run(at_once)
    alone, together = ([scored.plan.fingerprint for scored in plans[name]] for name in ("alone", "together"))
    assert alone == together


def test_another_keep_for_the_same_prompt_is_planned_without_scoring_it_again():
    async def test(scorer: AsyncDraftScorer) -> None:
        dense, sparse = await scorer.score(request(600, keep=0.8)), await scorer.score(request(600, keep=0.2))
        assert dense.num_scored == 600 and sparse.num_scored == 0
        assert len(sparse.plan.positions) < len(dense.plan.positions) / 2

    run(test)


def test_requests_that_cannot_be_scored_are_refused_with_value_and_limit():
    async def test(scorer: AsyncDraftScorer) -> None:
        refused = {
            r"0 tokens; it must have 1 to 500 \(max_tokens_scored\)": request(0),
            "501 tokens; it must have 1 to 500": request(501),
            "token id 4096 is not between 0 and 4095": request(token_ids=np.array([7, 4096], np.int32)),
            "num_dense is 301; it must be between 0 and 300": request(num_dense=301),
            "num_dense is -1": request(num_dense=-1),
            "keep is 0.05; it must be between 0.1 and 1": request(keep=0.05),
            "keep is nan": request(keep=float("nan")),
            "an anchor is at 300; it must be between 0 and 299": request(anchors=np.array([3, 300], np.int32)),
        }
        for reason, bad in refused.items():
            with pytest.raises(InvalidRequest, match=reason):
                await scorer.score(bad)
        assert scorer.status().num_refused == len(refused)
        assert (await scorer.score(request())).num_scored == 300

    run(test, max_tokens_scored=500)


def test_a_full_queue_refuses_with_the_limit_and_accepts_again_after_cancellations():
    async def test(scorer: AsyncDraftScorer) -> None:
        tasks = [asyncio.create_task(scorer.score(request(2000, i))) for i in range(3)]
        await until(lambda: scorer.status().num_running == 1 and scorer.status().num_waiting == 2)
        with pytest.raises(Overloaded, match=r"3 prompts are .* the limit is 3 \(max_running 1 \+ max_queue 2\)"):
            await scorer.score(request())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await scorer.score(request())
        status = scorer.status()
        assert (status.num_refused, status.num_cancelled, status.num_scored) == (1, 3, 1)

    run(test, slow, max_running=1, max_queue=2)


def test_a_cancelled_prompt_stops_within_a_chunk_and_its_memory_is_freed():
    steps: list[None] = []

    class Counting(SlowScorer):
        def step(self) -> None:
            steps.append(None)
            super().step()

    async def test(scorer: AsyncDraftScorer) -> None:
        before = scorer.status().memory["active_bytes"]
        task = asyncio.create_task(scorer.score(request(4000)))
        await until(lambda: len(steps) > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        at_cancel = len(steps)
        await until(lambda: scorer.status().memory["job_bytes"] == 0)
        assert len(steps) <= at_cancel + 1
        status = scorer.status()
        assert (status.num_running, status.num_cancelled) == (0, 1)
        assert status.memory["active_bytes"] == before

    run(test, lambda config, draft, publish: Counting(load_draft(draft), config, publish))


def test_a_prompt_that_fails_is_the_scorers_failure_and_the_next_one_is_scored():
    class Failing(Scorer):
        def _advance(self, job: Any) -> ScoreResult | None:
            if len(job.key) == 299:
                raise RuntimeError("no memory left")
            return super()._advance(job)

    async def test(scorer: AsyncDraftScorer) -> None:
        with pytest.raises(EngineFailed, match="RuntimeError: no memory left"):
            await scorer.score(request(299))
        assert (await scorer.score(request(300))).num_scored == 300
        scorer.check_health()
        assert scorer.status().num_failed == 1 and scorer.status().state == "ready"

    run(test, lambda config, draft, publish: Failing(load_draft(draft), config, publish))


def test_a_dying_scorer_thread_fails_open_requests_and_makes_the_scorer_unhealthy():
    made: list[SlowScorer] = []

    def make(config: SpecPrefillConfig, draft: EngineConfig, publish: Any) -> Scorer:
        made.append(SlowScorer(load_draft(draft), config, publish))
        return made[0]

    async def test(scorer: AsyncDraftScorer) -> None:
        task = asyncio.create_task(scorer.score(request(4000)))
        await until(lambda: scorer.status().num_running == 1)
        scorer.check_health()
        made[0].broken = True
        with pytest.raises(EngineFailed, match="RuntimeError: boom"):
            await task
        assert scorer.status().state == "failed"
        with pytest.raises(EngineFailed, match="boom"):
            scorer.check_health()
        with pytest.raises(EngineFailed, match="boom"):
            await scorer.score(request())

    run(test, make)


def test_a_hanging_step_makes_the_scorer_unhealthy(monkeypatch):
    monkeypatch.setattr(draft_scorer, "STEP_TIMEOUT_S", 0.005)

    async def test(scorer: AsyncDraftScorer) -> None:
        scorer.check_health()
        task = asyncio.create_task(scorer.score(request(4000)))
        await until(lambda: scorer.status().num_running == 1)
        with pytest.raises(EngineFailed, match=r"a step has been running for 0 s; the limit is 0 s"):
            for _ in range(200):
                scorer.check_health()
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: scorer.status().num_running == 0)
        await asyncio.sleep(0.05)
        scorer.check_health()

    run(test, slow)


def test_shutdown_fails_open_requests_and_refuses_new_ones():
    async def main() -> None:
        scorer = AsyncDraftScorer(SpecPrefillConfig(device="cpu"), EngineConfig(), make_scorer=slow)
        with pytest.raises(EngineFailed, match="not ready: it is loading"):
            await scorer.score(request())
        await scorer.wait_ready()
        task = asyncio.create_task(scorer.score(request(4000)))
        await until(lambda: scorer.status().num_running == 1)
        await scorer.shutdown()
        with pytest.raises(EngineFailed, match="the scorer was shut down"):
            await task
        with pytest.raises(EngineFailed, match="the scorer was shut down"):
            await scorer.score(request())
        assert scorer.status().state == "stopped"

    asyncio.run(main())


def test_the_status_names_the_loaded_draft_and_its_device():
    async def test(scorer: AsyncDraftScorer) -> None:
        status = scorer.status()
        assert (status.state, status.draft_model, status.error) == ("ready", "demo", None)
        assert "cpu" in status.device and status.memory["weights_bytes"] > 0 and status.memory["budget_bytes"] > 0

    run(test)


def test_a_rendered_chat_prompt_gets_a_plan_of_the_requested_size_that_fits_it():
    tokenizer = ChatTokenizer(Path(draft_scorer.__file__).parent / "demo_model")
    messages = [{"role": "user", "content": "Where does Anna live? " + "The sky is blue today. " * 40}]
    prompt = tokenizer.chat_prompt(messages, template_kwargs={})

    async def test(scorer: AsyncDraftScorer) -> None:
        r = ScoreRequest("chat", prompt.token_ids, 0, NO_ANCHORS, 0.3, prompt.boundaries, "tenant")
        scored = await scorer.score(r)
        assert why_unfit(scored.plan, r.token_ids) is None
        assert 0.3 * len(r.token_ids) <= len(scored.plan.positions) < 0.6 * len(r.token_ids)
        importance = np.zeros(len(r.token_ids))
        assert len(make_plan(r, importance).positions) <= len(scored.plan.positions) + 32

    run(test)


def test_a_draft_that_is_not_there_is_unavailable():
    unavailable("model '/no/such/draft': there is no directory", draft_model="/no/such/draft")


def test_a_draft_with_another_tokenizer_is_unavailable(tiny_model):
    tiny = str(tiny_model())
    unavailable(
        "the draft model cannot score prompts of demo: '</tool_response>' is 13 in the target's tokenizer, no added",
        draft_model=tiny,
    )
    unavailable("the draft model cannot score prompts of .*model: '", target=tiny)


def test_a_draft_that_cannot_be_read_is_unavailable(monkeypatch):
    def unreadable(*args: Any) -> Any:
        raise EngineFailed("the draft model cannot score prompts: layer 0 (Block) has no self_attn")

    async def main() -> None:
        scorer = AsyncDraftScorer(SpecPrefillConfig(device="cpu"), EngineConfig(), make_scorer=unreadable)
        with pytest.raises(EngineFailed, match="layer 0"):
            await scorer.wait_ready()
        assert scorer.status().state == "unavailable"
        await scorer.shutdown()

    asyncio.run(main())


def test_a_gpu_beside_an_engine_must_be_shared_by_declaration():
    unavailable("the engine uses the same GPU from another process.*set memory_share", device="gpu", beside_engine=True)
    beside = [
        choose_device(SpecPrefillConfig.model_validate(config), True)
        for config in ({}, {"device": "cpu"}, {"device": "gpu", "memory_share": 0.2})
    ]
    assert beside == ["cpu", "cpu", "gpu"] and choose_device(SpecPrefillConfig(), False) == "auto"
    assert choose_device(SpecPrefillConfig(device="gpu"), False) == "gpu"
