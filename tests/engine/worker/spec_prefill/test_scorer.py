"""Prompts scored in turns: who is next, what is read again, what stays in memory, and who fails."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.spec_prefill.plan import ScoreRequest, make_plan
from engine.errors import EngineFailed, InvalidRequest
from engine.processing.checkpoint import draft_of
from engine.protocol import Boundary
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker import memory
from engine.worker.spec_prefill import reuse, scorer
from engine.worker.spec_prefill.draft import Draft
from engine.worker.spec_prefill.scorer import PublishScore, ScoreJob, Scorer, ScoreResult
from tests.engine.worker.spec_prefill.drafts import brute_force, load, prompt
from tests.support.clock import Clock
from tests.support.night import some_at_night

NO_ANCHORS = np.empty(0, np.int32)
HAS_BOTH = "the hybrid draft has recurrent layers and layers with attention, of which the demo model's has the latter"


class Watched(Scorer):
    """A scorer whose forwards are noted in turns: (job, tokens read). fail: raised by a job's forward, if any."""

    def __init__(self, draft: Any, config: SpecPrefillConfig, publish: PublishScore, clock: Callable[[], float]):
        self.turns: list[tuple[str, int]] = []
        self.fail: Callable[[str, int], None] = lambda job, position: None
        super().__init__(draft, config, publish, clock)

    def _advance(self, job: ScoreJob) -> ScoreResult | None:
        self.now = job.id
        return super()._advance(job)

    def note(self, num_tokens: int, position: int) -> None:
        self.turns.append((self.now, num_tokens))
        self.fail(self.now, position)


class WatchedDraft:
    def __init__(self, draft: Draft):
        self._draft = draft
        self.note: Callable[[int, int], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def extend(self, token_ids: np.ndarray, start: int, *args: Any) -> None:
        self.note(len(token_ids), start)
        self._draft.extend(token_ids, start, *args)

    def look_ahead(self, token_id: mx.array, cache: Any) -> tuple[mx.array, list[mx.array]]:
        self.note(1, 0)
        return self._draft.look_ahead(token_id, cache)


class TokenClock(Clock):
    """A token takes 1 s, and 1 s more per thousand tokens in front of it; a look-ahead step takes look_s."""

    def __init__(self, look_s: float = 0.0):
        super().__init__()
        self._look_s = look_s
        self.slowness = 1.0

    def before(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return `note`, called after the time of its tokens has passed."""

        def timed(num_tokens: int, position: int) -> None:
            self.advance(self.slowness * (num_tokens * (1 + position / 1000) if num_tokens > 1 else self._look_s))
            note(num_tokens, position)

        return timed


class Bench:
    """A scorer driven by hand. outcomes: by job. budget: bytes for prompts and snapshots."""

    def __init__(self, draft: Draft, budget: int | None = None, clock: "TokenClock | None" = None, **config: Any):
        self.draft = WatchedDraft(draft)
        self.outcomes: dict[str, ScoreResult] = {}
        settings = SpecPrefillConfig.model_validate(config)
        self.scorer = Watched(self.draft, settings, self.outcomes.__setitem__, clock or time.monotonic)
        if budget is not None:
            self.scorer.limits = replace(self.scorer.limits, budget=budget)
        self.draft.note = self.scorer.note if clock is None else clock.before(self.scorer.note)
        self.turns = self.scorer.turns

    def add(self, job: str, ids: np.ndarray, **request: Any) -> None:
        self.scorer.add(job, request_of(ids, **request))

    def run(self, *jobs: str) -> list[ScoreResult]:
        """All that is open; these jobs' outcomes."""
        while self.scorer.has_work:
            self.scorer.step()
        return [self.outcomes[job] for job in jobs]

    def score(self, job: str, ids: np.ndarray, **request: Any) -> np.ndarray:
        self.add(job, ids, **request)
        (outcome,) = self.run(job)
        assert outcome.importance is not None, outcome.error
        return outcome.importance


def request_of(ids: np.ndarray, **fields: Any) -> ScoreRequest:
    return ScoreRequest("r", **{"token_ids": ids, "num_dense": 0, "anchors": NO_ANCHORS, "keep": 0.3} | fields)


@pytest.fixture
def bench(draft_of: Callable[[str], Draft]) -> Callable[..., Bench]:
    return lambda family="qwen3", **config: Bench(draft_of(family), **config)


@pytest.mark.parametrize("family", ["demo", "hybrid"])
def test_a_prompts_importance_is_the_mean_over_all_steps(bench, draft_of, family, monkeypatch):
    ids = prompt(90, seed=4)
    found = bench(family, chunk_size=32, lookahead=4).score("a", ids)
    expected = brute_force(draft_of(family), ids, 4, monkeypatch)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_the_look_ahead_ends_at_a_stop_token_but_not_before_the_first_step(bench):
    one = bench(lookahead=5)
    one.score("all", prompt(40))
    assert one.turns == [("all", 39)] + 5 * [("all", 1)]
    one.draft.stop_token_ids = frozenset(range(512))
    one.turns.clear()
    found = one.score("stopped", prompt(40, seed=1))
    assert one.turns == [("stopped", 39)] + 2 * [("stopped", 1)], "one step is launched before its token is read"
    assert np.array_equal(found, bench(lookahead=1).score("one", prompt(40, seed=1))), "and does not count"


@pytest.mark.parametrize("family", some_at_night(["demo", "hybrid"], ["hybrid"], HAS_BOTH))
def test_look_ahead_steps_awaited_one_by_one_give_the_same_scores(bench, draft_of, family, monkeypatch):
    ids = prompt(300, seed=6)
    found = bench(family, chunk_size=64).score("ahead", ids)
    monkeypatch.setattr(scorer, "MAX_COPIED_BYTES", 0)
    assert np.array_equal(bench(family, chunk_size=64).score("waits", ids), found)
    expected = step_by_step(draft_of(family), ids, SpecPrefillConfig().lookahead)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
    for keep in (0.1, 0.3, 0.6):
        plans = [make_plan(request_of(ids, keep=keep), importance) for importance in (found, expected)]
        assert plans[0].fingerprint == plans[1].fingerprint


def step_by_step(draft: Draft, ids: np.ndarray, num_steps: int) -> np.ndarray:
    """Importance with the host in each step: what it has read is scored before the next token is known."""
    cache, last = draft.make_cache(), len(ids) - 1
    for start in range(0, last, 64):
        draft.extend(ids[start : min(start + 64, last)], start, cache, len(ids) + num_steps)
    total, token_id = np.zeros(len(ids), np.float32), int(ids[-1])
    for step in range(num_steps):
        following, before = draft.look_ahead(mx.array([[token_id]], mx.int32), cache)
        total += np.array(draft.observe([before], last + step, cache, len(ids)))
        token_id = int(np.array(following).item())
    return total / num_steps


@pytest.mark.parametrize("family", some_at_night(["demo", "hybrid"], ["hybrid"], HAS_BOTH))
def test_the_size_of_the_chunks_does_not_change_the_plan(bench, family):
    ids, plans, found = prompt(700, seed=5), [], []
    for chunk_size in (16, 100, 1024):
        found.append(bench(family, chunk_size=chunk_size).score("a", ids))
        plans.append(make_plan(request_of(ids), found[-1]).fingerprint)
    assert len(set(plans)) == 1
    np.testing.assert_allclose(found[0], found[2], rtol=1e-3)


def test_prompts_take_turns_chunk_by_chunk_and_get_the_same_scores_as_alone(bench):
    prompts = {name: prompt(length, seed) for seed, (name, length) in enumerate([("a", 65), ("b", 33), ("c", 97)])}
    alone = {name: bench(chunk_size=32, lookahead=2).score(name, ids) for name, ids in prompts.items()}
    together = bench(chunk_size=32, lookahead=2, max_running=2)
    for name, ids in prompts.items():
        together.add(name, ids)
    assert together.scorer.num_waiting == 3
    together.scorer.step()
    assert together.scorer.num_running == 2 and together.scorer.num_waiting == 1
    outcomes = dict(zip(prompts, together.run(*prompts), strict=True))
    assert [job for job, _ in together.turns] == list("abababaccccc")
    for name in prompts:
        assert np.array_equal(outcomes[name].importance, alone[name]), name


def test_scoring_a_prompt_twice_gives_the_same_importance(bench):
    ids = prompt(300)
    assert np.array_equal(bench("hybrid").score("a", ids), bench("hybrid").score("b", ids))


def test_an_aborted_prompt_is_read_no_further_and_its_memory_is_free(bench):
    one = bench("hybrid", chunk_size=64, max_running=1)
    one.score("warm", prompt(200))
    before = mx.get_active_memory()
    one.turns.clear()
    one.add("gone", prompt(2000, seed=1))
    one.add("waits", prompt(2000, seed=2))
    one.scorer.step()
    assert mx.get_active_memory() > before + one.draft.cache_bytes(1500)
    one.scorer.abort("gone")
    one.scorer.abort("waits")
    assert not one.scorer.has_work and one.turns == [("gone", 64)] and one.outcomes.keys() == {"warm"}
    assert mx.get_active_memory() == before and one.scorer.memory["job_bytes"] == 0


def test_a_prompt_waits_until_its_bytes_fit_and_one_that_never_will_is_refused(bench):
    need = bench().draft.cache_bytes(1000 + 8)
    one = bench(budget=int(2.5 * need))
    for name in "abc":
        one.add(name, prompt(1000, seed=ord(name)))
    one.scorer.step()
    assert one.scorer.num_running == 2 and one.scorer.memory["job_bytes"] == 2 * need
    one.run(*"abc")
    one.scorer.limits.check(request_of(prompt(2000)))
    with pytest.raises(InvalidRequest, match=rf"3000 tokens takes \d+ bytes; the limit is {one.scorer.limits.budget} "):
        one.scorer.limits.check(request_of(prompt(3000)))
    longest = one.scorer.limits.max_prompt_tokens
    one.scorer.limits.check(request_of(prompt(longest)))
    with pytest.raises(InvalidRequest):
        one.scorer.limits.check(request_of(prompt(longest + 1)))


def test_a_memory_share_that_does_not_hold_the_weights_is_refused(bench, monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 1000)
    with pytest.raises(EngineFailed, match=r"memory_share: 0.5 of the device's 1000 bytes is less than the draft's"):
        bench(memory_share=0.5)


def test_prompts_outside_of_the_drafts_context_or_vocabulary_are_refused(bench):
    one = bench(lookahead=6)
    one.scorer.limits.check(request_of(prompt(4090)))
    assert one.scorer.limits.max_prompt_tokens == 4090
    with pytest.raises(
        InvalidRequest, match=r"4091 tokens; the limit is 4090, the draft's context of 4096 less 6 \(lookahead\)"
    ):
        one.scorer.limits.check(request_of(prompt(4091)))
    for token_id in (-1, 512):
        with pytest.raises(InvalidRequest, match=f"token id {token_id} is not between 0 and 511"):
            one.scorer.limits.check(request_of(np.array([5, token_id, 7], np.int32)))


def test_a_prompt_that_fails_fails_alone(bench):
    ids = prompt(200)
    expected = bench(chunk_size=64).score("alone", ids)
    one = bench(chunk_size=64)

    def fail(job: str, position: int) -> None:
        if job == "bad" and position > 64:
            raise RuntimeError("no memory left")

    one.scorer.fail = fail
    gc.collect()
    before = mx.get_active_memory()
    for name, token_ids in (("bad", prompt(200, seed=1)), ("good", ids)):
        one.add(name, token_ids, boundaries=(Boundary("system", 64),) if name == "bad" else ())
    bad, good = one.run("bad", "good")
    assert bad.importance is None and bad.error == "RuntimeError: no memory left"
    assert np.array_equal(good.importance, expected)
    assert (snapshots := one.scorer.memory["snapshot_bytes"]) == one.draft.bytes_per_token * 199, "the good one's"
    assert 0 <= mx.get_active_memory() - before - snapshots < 2**14, "buffers are rounded up"


def test_scores_that_are_not_finite_fail_their_prompt_and_leave_no_snapshot(checkpoint):
    draft = load(checkpoint("qwen3"))
    draft._lm.model.embed_tokens.weight[77] = float("nan")
    outcomes: dict[str, ScoreResult] = {}
    poisoned_scorer = Scorer(draft, SpecPrefillConfig(), outcomes.__setitem__)
    poisoned, clean = prompt(100), prompt(100, seed=1)
    poisoned[50], clean[clean == 77] = 77, 78
    for name, ids in (("poisoned", poisoned), ("clean", clean)):
        poisoned_scorer.add(name, request_of(ids))
    poisoned_scorer.step()
    assert poisoned_scorer.memory["snapshot_bytes"] == 0
    while poisoned_scorer.has_work:
        poisoned_scorer.step()
    assert outcomes["poisoned"].error == "EngineFailed: all scores of the 100 tokens are NaN or inf"
    assert outcomes["clean"].importance is not None


def test_memory_does_not_grow_over_random_prompts_and_aborts(bench):
    one = bench("hybrid", chunk_size=64, lookahead=2)
    rng, after = np.random.default_rng(0), []
    for storm in range(3):
        for i in range(8):
            one.scorer.add(f"{storm}.{i}", request_of(prompt(int(rng.integers(2, 500)), seed=100 * storm + i)))
        for i in range(0, 8, 3):
            one.scorer.step()
            one.scorer.abort(f"{storm}.{i}")
        one.run()
        one.scorer._reuse.clear()
        gc.collect()
        after.append(mx.get_active_memory())
    assert after[0] == after[1] == after[2]


@pytest.mark.parametrize("family", some_at_night(["demo", "hybrid"], ["hybrid"], HAS_BOTH))
class TestReuse:
    def test_a_conversation_that_grows_is_read_once_and_scored_as_if_it_were_read_anew(self, bench, family):
        ids = prompt(600, seed=7)
        cuts = (Boundary("system", 100), Boundary("turn", 300))
        one = bench(family, chunk_size=64)
        one.score("first", ids[:312], boundaries=cuts)
        one.turns.clear()
        found = one.score("second", ids, boundaries=cuts)
        assert (
            one.outcomes["second"].num_read == 300
            and sum(n for _, n in one.turns) == 299 + SpecPrefillConfig().lookahead
        )
        fresh = bench(family, chunk_size=64).score("fresh", ids, boundaries=cuts)
        assert np.array_equal(found, fresh), "chunks end where they ended"

    def test_the_plan_is_the_same_where_chunks_end_at_other_places(self, bench, family):
        ids = prompt(600, seed=8)
        one = bench(family, chunk_size=64)
        one.score("first", ids[:331], boundaries=(Boundary("system", 37),))
        found = one.score("second", ids)
        assert one.outcomes["second"].num_read == 600 - 330
        fresh = bench(family, chunk_size=64).score("fresh", ids)
        np.testing.assert_allclose(found, fresh, rtol=1e-3)
        for keep in (0.1, 0.3, 0.6):
            plans = [make_plan(request_of(ids, keep=keep), importance) for importance in (found, fresh)]
            assert plans[0].fingerprint == plans[1].fingerprint


def test_a_scored_prompt_with_another_keep_or_anchors_costs_no_forward(bench):
    ids, one = prompt(200), bench()
    first = one.score("first", ids)
    one.turns.clear()
    one.add("busy", prompt(300, seed=1))
    one.add("again", ids, num_dense=100, keep=0.5, anchors=np.array([3], np.int32))
    again = one.outcomes["again"].importance
    assert one.turns == [] and one.outcomes["again"].num_read == 0 and np.array_equal(first, again)
    for i in range(reuse.MAX_IMPORTANCES):
        one.score(f"other {i}", prompt(20, seed=50 + i))
    one.turns.clear()
    assert np.array_equal(one.score("late", ids), first) and one.turns[0] == ("late", 1)


def test_a_snapshot_that_cannot_be_restored_fails_one_prompt_alone(bench, monkeypatch):
    ids, one = prompt(200), bench()
    one.score("first", ids[:150])
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "restore", lambda *args: 1 / 0)
        one.add("unlucky", ids)
        (outcome,) = one.run("unlucky")
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert np.array_equal(one.score("next", ids), bench().score("alone", ids))
    assert one.outcomes["next"].num_read == 200


@pytest.mark.parametrize("max_running", [1, 4])
def test_equal_prompts_that_arrive_together_are_read_once(bench, max_running):
    ids, one = prompt(200), bench(max_running=max_running, chunk_size=64)
    one.add("a", ids)
    one.add("b", ids)
    one.add("other", ids[:150])
    one.scorer.step()
    assert one.scorer.num_running == min(max_running, 2), "b waits for a, the other does not wait for b"
    a, b, _ = one.run("a", "b", "other")
    assert a.num_read == 200 and b.num_read == 0 and np.array_equal(a.importance, b.importance)


def test_a_prompt_that_cannot_be_scored_in_time_is_refused_at_once(bench):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=500)
    one.score("short", prompt(300))
    one.turns.clear()
    one.add("long", prompt(600, seed=1))
    late = one.outcomes["long"]
    assert late.is_late and late.importance is None and not one.scorer.has_work and not one.turns
    assert "scoring 600 tokens would take about 7" in late.error and "the limit is 500 s (deadline_s)" in late.error
    one.add("a", prompt(250, seed=2))
    one.add("b", prompt(240, seed=3))
    assert "b" in one.outcomes and "with 1 other prompts" in one.outcomes["b"].error, "not both together"
    assert one.run("a")[0].importance is not None


@pytest.mark.parametrize("limit_s", [100.0, None])
def test_first_prompt_is_refused_at_once_where_a_probe_has_shown_that_it_takes_too_long(bench, limit_s):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=200)
    one.scorer.now = "probe"
    one.scorer.probe()
    assert one.turns == [("probe", 64), ("probe", 64)], "the second chunk has taken longer than MAX_PROBE_S"
    one.add("long", prompt(600), limit_s=limit_s)
    refused = one.outcomes["long"]
    assert refused.is_too_slow == (limit_s is not None) and len(one.turns) == 2 and not one.scorer.has_work
    assert "scoring 600 tokens would take about 31" in refused.error and "0 other prompts in progress" in refused.error
    one.add("short", prompt(90), limit_s=limit_s)
    assert one.run("short")[0].importance is not None


def test_scorer_is_probed_when_it_is_loaded():
    slow = scorer.load_scorer(SpecPrefillConfig(), EngineConfig(model=draft_of(None)), {}.__setitem__)
    assert 0 < slow._pace.seconds(0, 1000) < 60


@pytest.mark.parametrize("limit_s", [None, 1000.0])
def test_prompts_refused_for_a_pace_from_a_busy_machine_are_scored_again_after_some_time(bench, limit_s):
    clock = TokenClock()
    one = bench(clock=clock, chunk_size=64, deadline_s=1000 if limit_s is None else 2000)
    clock.slowness = 2.0
    one.score("slow", prompt(300))
    clock.slowness = 1.0
    num_tried = 0
    while not one.scorer.has_work and num_tried < 40:
        num_tried += 1
        one.add(f"{num_tried}", prompt(600, seed=num_tried), limit_s=limit_s)
    assert 10 < num_tried < 30, "predicted are 1560 s; 780 s are needed"
    assert one.run(f"{num_tried}")[0].importance is not None
    one.add("next", prompt(600, seed=50), limit_s=limit_s)
    assert one.run("next")[0].importance is not None


def test_scoring_that_takes_longer_than_the_plan_saves_is_refused_at_once(bench):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=500)
    one.score("short", prompt(300))
    one.turns.clear()
    one.add("no gain", prompt(300, seed=1), limit_s=100.0)
    refused = one.outcomes["no gain"]
    assert refused.is_too_slow and not refused.is_late and not one.scorer.has_work and not one.turns
    assert "scoring 300 tokens would take about 3" in refused.error and "would save only 100 s" in refused.error
    one.add("gain", prompt(300, seed=1), limit_s=450.0)
    assert one.run("gain")[0].importance is not None


def test_steps_that_look_ahead_count_as_scoring(bench):
    one = bench(clock=TokenClock(look_s=100.0), chunk_size=64, deadline_s=10_000)
    one.score("short", prompt(300))
    one.add("no gain", prompt(300, seed=1), limit_s=600.0)
    assert one.outcomes["no gain"].is_too_slow, "its 300 tokens take 350 s, and then it looks ahead"


def test_equal_prompts_count_only_once_towards_the_deadline(bench):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=500)
    one.score("short", prompt(250))
    ids = prompt(300, seed=1)
    for name in "abc":
        one.add(name, ids)
    outcomes = one.run(*"abc")
    assert [outcome.num_read for outcome in outcomes] == [300, 0, 0]


def test_a_prompt_that_turns_out_too_slow_is_abandoned_early(bench):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=400)
    one.add("slow", prompt(600))
    (late,) = one.run("slow")
    assert late.is_late and "at the current pace; the limit is 400 s" in late.error
    assert 3 <= len(one.turns) < 600 // 64, "as soon as it is known"
    assert one.scorer.memory["job_bytes"] == 0


def test_a_prompt_that_might_be_late_goes_first(bench):
    clock = TokenClock()
    one = bench(clock=clock, chunk_size=64, deadline_s=1000)
    one.score("known", prompt(300))
    one.add("first", prompt(400, seed=1))
    one.scorer.step()
    clock.advance(1000 - 560)  # what it needs is hardly left
    one.add("second", prompt(200, seed=2))
    one.turns.clear()
    first, second = one.run("first", "second")
    assert first.importance is not None and second.importance is not None
    read = [job for job, num_tokens in one.turns if num_tokens > 1]
    assert read == sorted(read), "not in turns"


def test_cached_tokens_do_not_count_towards_the_deadline(bench):
    one = bench(clock=TokenClock(), chunk_size=64, deadline_s=500)
    text = prompt(450)
    one.score("turn", text[:400])
    assert one.score("next", text) is not None and one.outcomes["next"].num_read == 51
    one.add("as long", prompt(450, seed=1))
    assert one.outcomes["as long"].is_late


def test_tenants_share_neither_snapshots_nor_scores(bench):
    ids, one = prompt(200), bench()
    mine = one.score("mine", ids, tenant="me")
    theirs = one.score("theirs", ids, tenant="you")
    assert one.outcomes["theirs"].num_read == 200 and np.array_equal(mine, theirs)


def test_snapshots_take_at_most_half_of_the_budget_and_are_evicted_for_prompts(bench):
    per_token = bench().draft.bytes_per_token
    one = bench(budget=2200 * per_token)
    for i in range(4):
        one.score(f"{i}", prompt(500, seed=i))
        assert one.scorer.memory["snapshot_bytes"] <= one.scorer.limits.budget // 2
    assert one.scorer.memory["snapshot_bytes"] == 2 * 499 * per_token, "the last two"
    longer = np.concatenate([prompt(500, seed=2), prompt(1300)])
    one.add("long", longer)
    one.scorer.step()
    used = one.scorer.memory
    assert used["job_bytes"] + used["snapshot_bytes"] <= one.scorer.limits.budget and used["snapshot_bytes"] == 0
    one.run("long")


def test_the_snapshot_that_a_prompt_continues_is_evicted_last(bench):
    per_token = bench().draft.bytes_per_token
    one = bench(budget=2200 * per_token)
    for i in range(2):
        one.score(f"{i}", prompt(500, seed=i))
    one.score("longer", np.concatenate([prompt(500, seed=0), prompt(900)]))
    assert one.outcomes["longer"].num_read == 1400 - 499


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_short_prompts_are_scored_too(bench, num_tokens):
    found = bench("hybrid").score("a", prompt(num_tokens))
    assert found.shape == (num_tokens,) and np.isfinite(found).all()
