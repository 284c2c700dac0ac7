"""Answers that go on in another engine: those that it continues, and those that it gives away."""

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.errors import MemoryExceeded
from engine.protocol import EngineRequest, FinishReason, Progress, SamplingParams, TokenChunk
from tests.engine.core.rows import finish_prefill, out, scheduler_of, spec, step_of
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, FakeRunner, answer, token

NUM_PROMPT = 40


def request(request_id: str = "r", n: int = 1, max_tokens: int = 12, seed: int = 1) -> EngineRequest:
    params = SamplingParams(max_tokens, seed=seed, logprobs=0)
    return EngineRequest(request_id, np.arange(NUM_PROMPT, dtype=np.int32), params, (STOP,), num_choices=n)


def after(whole: EngineRequest, *num_tokens: int | None) -> EngineRequest:
    """The request after so many tokens of each choice; None: the choice is finished."""
    return replace(
        whole,
        progress=tuple(
            Progress(tuple(answer(whole, i)[:num]), is_finished=num is None) for i, num in enumerate(num_tokens)
        ),
    )


def config(**options) -> EngineConfig:
    return EngineConfig.model_validate({"prefix_cache": {"enabled": False}, **options})


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_answer_cut_anywhere_goes_on_with_the_tokens_that_would_have_come(num_drafts):
    whole = request()
    for cut in range(whole.sampling.max_tokens):
        driver = Driver(FakeRunner(num_drafts), config(mtp={"max_draft_tokens": num_drafts} if num_drafts else "off"))
        tokens = driver.run({0: [after(whole, cut)]})["r"]
        assert tokens == answer(whole)[cut:] and driver.finish["r"] is FinishReason.LENGTH
        logprobs = [one.logprob for chunk in driver.chunks["r"] for one in chunk.logprobs]
        assert logprobs == [-float(position) for position in range(cut, 12)], "the position is that of the whole answer"
        assert driver.core.stats.num_output_tokens == 12 - cut


def test_a_stop_token_ends_a_continued_answer_as_it_would_have_ended_it():
    runner = FakeRunner()
    runner.stops_at = {1: 7}
    driver = Driver(runner, config())
    assert driver.run({0: [after(request(), 5)]})["r"] == answer(request())[5:7]
    assert driver.finish["r"] is FinishReason.STOP


def test_choices_go_on_each_from_its_own_tokens_and_a_finished_one_gets_no_chunk():
    whole = request(n=4)
    driver = Driver(FakeRunner(), config())
    tokens = driver.run({0: [after(whole, 3, None, 0, 11)], 2: [request("other", seed=5)]})
    assert "r/1" not in driver.chunks
    assert [tokens[name] for name in ("r", "r/2", "r/3")] == [
        answer(whole, 0)[3:],
        answer(whole, 2),
        answer(whole, 3)[11:],
    ]
    assert driver.core.stats.num_finished == 4 and not driver.core.has_work


def test_the_prompt_of_continued_choices_is_computed_once_with_a_prefix_cache():
    whole = request(n=4)
    driver = Driver(FakeRunner(), EngineConfig())
    tokens = driver.run({0: [after(whole, 3, 5, 0, 0)]})
    assert [tokens[name] for name in ("r", "r/1")] == [answer(whole, 0)[3:], answer(whole, 1)[5:]]
    assert driver.core.stats.num_prompt_tokens == NUM_PROMPT + (1 + 3) + (1 + 5)
    cached = [driver.chunks[name][0].num_cached for name in ("r", "r/1", "r/2", "r/3")]
    assert cached == [39, 39, 0, 0], "the two without a token share the prefill, which is shorter and comes first"


def test_a_continued_answer_finds_the_snapshot_of_an_answer_that_contains_it():
    """As of an engine that has stored the whole answer, or all of it up to a preemption."""
    whole = request(max_tokens=40)
    driver = Driver(FakeRunner(), EngineConfig())
    driver.run({0: [replace(whole, request_id="before", sampling=replace(whole.sampling, max_tokens=20))]})
    before = driver.core.stats.num_prompt_tokens
    assert driver.run({0: [after(whole, 30)]})["r"] == answer(whole)[30:]
    assert driver.core.stats.num_prompt_tokens - before == 30 - 20
    assert {chunk.num_cached for chunk in driver.chunks["r"]} == {NUM_PROMPT}, "only prompt tokens are reported"


def test_a_continued_answer_may_be_preempted_and_goes_on():
    whole = request(max_tokens=60)
    driver = Driver(FakeRunner(), EngineConfig())
    driver.core.add_request(after(whole, 30))
    while len(driver.tokens["r"]) < 5:
        driver.core.step()
    driver.core.scheduler.preempt(driver.core.scheduler.decoding[0], "growth")
    driver.run({0: []})
    assert driver.tokens["r"] == answer(whole)[30:] and driver.core.stats.num_preempted == 1


def test_memory_is_needed_for_the_answer_that_is_left_and_max_tokens_is_lowered_for_the_whole():
    runner = FakeRunner()
    runner.costs = replace(runner.costs, token_bytes=2**20)
    core = Driver(runner, EngineConfig()).core
    needs, pinned_bytes = core.budget.needs, core.figures.pinned_bytes
    fitted = needs.clamp_max_tokens(request(max_tokens=5000), pinned_bytes).sampling.max_tokens
    assert 100 < fitted < 5000
    assert needs.clamp_max_tokens(after(request(max_tokens=5000), 100), pinned_bytes).sampling.max_tokens == fitted
    fits = after(request(max_tokens=fitted), 100)
    assert needs.clamp_max_tokens(fits, pinned_bytes) is fits
    with pytest.raises(MemoryExceeded):
        needs.clamp_max_tokens(after(request(max_tokens=5000), fitted), pinned_bytes)
    open_and_finished = after(request(n=4, max_tokens=5000), 100, None, None, None)
    assert needs.clamp_max_tokens(open_and_finished, pinned_bytes).sampling.max_tokens == fitted, (
        "finished choices need no memory"
    )


def continued(num_prompt: int, *num_tokens: int, client: str = "a", request_id: str = "r") -> EngineRequest:
    whole = replace(spec(request_id, num_prompt, n=len(num_tokens)), client=client)
    return replace(whole, progress=tuple(Progress((9,) * num) for num in num_tokens))


def rows_of(request: EngineRequest) -> list[Row]:
    return [Row(request, index) for index in request.open_choices]


def test_the_client_is_charged_for_the_prompt_once_and_for_no_token_of_the_other_engine():
    scheduler = scheduler_of(max_running=4)
    scheduler.add(rows_of(replace(spec("other", 1), client="b")))  # with one client alone nothing is remembered
    scheduler.add(rows_of(continued(20, 10, 5)))
    for _ in range(3):
        if rows := step_of(scheduler).prefill:
            finish_prefill(scheduler, list(rows))
    assert scheduler._shares.served("a") == 20 + 2 * 2, "the prompt, and one output token of each choice"


def test_continued_answers_come_before_waiting_requests_in_the_order_of_their_choices():
    scheduler = scheduler_of(max_running=2)
    scheduler.add(rows_of(spec("first")))
    scheduler.add(rows_of(continued(4, 2, 3, client="")))
    assert [(one.request_id, one.preempted) for one in scheduler.queue.status(scheduler.budget.needs)] == [
        ("r", True),
        ("r", True),
        ("first", False),
    ]
    assert [entry.rows[0].index for entry in scheduler.queue.order()[:2]] == [0, 1]


def test_no_choice_of_a_continued_request_expires_in_the_queue():
    """Its client has read a part of the answer."""
    clock = Clock()
    scheduler = scheduler_of(clock=clock, scheduler={"queue_timeout_s": 10.0})
    scheduler.add(rows_of(continued(4, 2, 0)))
    clock.advance(100.0)
    assert not step_of(scheduler).failed


def test_the_timeline_of_a_continued_answer_is_that_of_this_engine():
    clock = Clock()
    scheduler = scheduler_of(clock=clock)
    (row,) = rows = rows_of(continued(4, 10))
    scheduler.add(rows)
    clock.advance(2.0)
    step_of(scheduler)
    finish_prefill(scheduler, rows)
    for _ in range(4):
        clock.advance(1.0)
        scheduler.update_decode({row.id: out(7)})
    clock.advance(1.0)
    timeline = scheduler.update_decode({row.id: out(2)})[row.id].timeline
    assert timeline is not None and (timeline.num_resumed, timeline.num_tokens) == (10, 5)
    assert (timeline.first_token_s, timeline.last_token_s, timeline.per_token_s) == (2.0, 6.0, 1.0)
    figures = scheduler.figures
    assert sum(figures.first_token_s.counts) == 0, "its first token came from another engine"
    assert (figures.output_tokens.total, figures.per_token_s.total) == (15, 1.0)


# Moving


def steps(driver: Driver, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.core.step()


def test_all_choices_end_with_moved_wherever_they_are_and_nothing_is_left():
    runner = FakeRunner()
    driver = Driver(runner, EngineConfig(max_running=4, prefill_chunk_tokens_busy=16))
    driver.core.add_request(request("decoding", n=2, max_tokens=100))
    steps(driver, 3)
    driver.core.add_request(replace(request("prefill", n=2), token_ids=np.arange(100, 400, dtype=np.int32)))
    driver.core.add_request(request("queued", n=3))
    steps(driver, 1)
    num_before = {name: len(driver.tokens[name]) for name in ("decoding", "decoding/1")}
    driver.core.move_all()
    assert set(driver.finish.values()) == {FinishReason.MOVED} and len(driver.finish) == 7
    assert not driver.core.has_work and not runner.rows and not runner.prompts
    stats = driver.core.stats
    assert (stats.num_moved, stats.num_preempted, stats.num_finished) == (7, 0, 0)
    assert not driver.core.scheduler.figures.preempted
    for name, num in num_before.items():
        last: TokenChunk = driver.chunks[name][-1]
        assert not last.token_ids and last.timeline is not None and last.timeline.finish_reason == "moved"
        assert len(driver.tokens[name]) - num <= 1, "no more than the step in flight"
        assert last.timeline.num_tokens == len(driver.tokens[name])


def test_states_of_moved_rows_and_prompts_stay_in_the_prefix_cache():
    driver = Driver(FakeRunner(), EngineConfig(prefill_chunk_tokens_busy=16))
    decoding, prompt = request("decoding", max_tokens=100), request("prompt", seed=3)
    prompt = replace(prompt, token_ids=np.arange(100, 400, dtype=np.int32))
    driver.core.add_request(decoding)
    while len(driver.tokens["decoding"]) < 30:
        driver.core.step()
    driver.core.add_request(prompt)
    steps(driver, 3)
    driver.core.move_all()
    num = len(driver.tokens["decoding"])
    going_on = replace(after(decoding, num), request_id="again")
    before = driver.core.stats.num_prompt_tokens
    assert driver.run({0: [going_on]})["again"] == answer(decoding)[num:]
    assert driver.core.stats.num_prompt_tokens - before == 1
    assert driver.run({0: [replace(prompt, request_id="prompt again")]})["prompt again"] == answer(prompt)
    assert driver.chunks["prompt again"][0].num_cached == 48


def test_a_row_that_the_step_in_flight_completes_is_finished_and_not_moved():
    driver = Driver(FakeRunner(), config())
    driver.core.add_request(request(max_tokens=12))
    while len(driver.tokens["r"]) < 11:
        driver.core.step()
    driver.core.move_all()
    assert driver.finish["r"] is FinishReason.LENGTH and driver.tokens["r"] == answer(request())


def test_rows_are_moved_without_the_tokens_of_a_step_in_flight_that_fails():
    runner = FakeRunner()
    driver = Driver(runner, config(max_running=1))
    driver.core.add_request(request("r", max_tokens=100))
    steps(driver, 3)
    driver.core.add_request(request("queued"))
    runner.broken = {"pending"}
    driver.core.move_all()
    assert driver.finish == {"r": FinishReason.MOVED, "queued": FinishReason.MOVED}
    num = len(driver.tokens["r"])
    assert driver.tokens["r"] == answer(request(max_tokens=100))[:num] and not driver.core.has_work


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_answers_that_move_through_several_engines_are_the_whole_answers(seed):
    rng = random.Random(seed)
    enabled = {"prefix_cache": {"enabled": rng.random() < 0.7}}
    wholes = [
        request(f"r{i}", n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 40), seed=100 * seed + i) for i in range(6)
    ]
    wholes = [replace(one, token_ids=np.arange(rng.choice([5, 40, 90]), dtype=np.int32)) for one in wholes]
    stops = {Row(one, 0).sampling.seed: rng.randint(0, 30) for one in wholes if rng.random() < 0.3}
    tokens: dict[tuple[str, int], list[int]] = {(r.request_id, i): [] for r in wholes for i in range(r.num_choices)}
    finish: dict[tuple[str, int], FinishReason] = {}
    left, num_moved = wholes, 0
    while left:
        runner = FakeRunner(2, accepts=lambda seed, position: (seed + position) % 3 > 0)
        runner.stops_at = stops
        limits = {"max_running": 4, "prefill_chunk_tokens": 32, "mtp": {"max_draft_tokens": 2}}
        driver = Driver(runner, config(**limits, **enabled))
        last = rng.randint(0, 25) if num_moved < 60 else 10_000
        arrivals = [(rng.randint(0, 10), one) for one in left]
        for step in range(last):
            for when, one in arrivals:
                if when == step:
                    driver.core.add_request(one)
            driver.core.step()
            if step > 10 and not driver.core.has_work:
                break
        driver.core.move_all()
        assert not driver.core.has_work and not runner.rows and not runner.prompts
        unseen = [one for when, one in arrivals if when >= last]
        for one in left:
            for i in one.open_choices:
                name = f"{one.request_id}/{i}" if i else one.request_id
                tokens[one.request_id, i] += driver.tokens[name]
                if one not in unseen and driver.finish[name] is not FinishReason.MOVED:
                    finish[one.request_id, i] = driver.finish[name]
        left = [going_on(one, tokens, finish) for one in left]
        left = [one for one in left if not one.progress or one.open_choices]
        num_moved += 1
    for one in wholes:
        for i in range(one.num_choices):
            sampled, stop = Row(one, i).sampling.seed, stops.get(Row(one, i).sampling.seed, 10_000)
            num = min(one.sampling.max_tokens, stop)
            assert tokens[one.request_id, i] == [token(sampled, position) for position in range(num)]
            stopped = stop < one.sampling.max_tokens
            assert finish[one.request_id, i] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def going_on(one: EngineRequest, tokens: dict, finish: dict) -> EngineRequest:
    keys = [(one.request_id, i) for i in range(one.num_choices)]
    if not any(tokens[key] for key in keys) and not any(key in finish for key in keys):
        return one
    return replace(one, progress=tuple(Progress(tuple(tokens[key]), key in finish) for key in keys))
