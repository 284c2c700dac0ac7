"""The scheduler without a model: order of requests, sizes of chunks, and ends of rows."""

from itertools import pairwise

import pytest

from engine.core.prefill_scheduler import MIN_PREFILL_TOKENS
from engine.core.prompt import Prompt
from engine.core.runner import NO_TOKEN, PrefillOutput, PromptChunk
from engine.core.scheduler import Scheduler
from engine.protocol import FinishReason, TokenLogprobs
from tests.engine.core.rows import (
    STOP,
    admitted,
    finish_prefill,
    out,
    rows_of,
    scheduler_of,
    spec,
    start,
    step_of,
)
from tests.support.clock import Clock


@pytest.fixture
def scheduler() -> Scheduler:
    return scheduler_of()


def test_equal_prompts_are_computed_one_after_the_other_in_the_order_of_arrival(scheduler):
    a, b = rows_of(spec("a")), rows_of(spec("b"))
    scheduler.add(a)
    scheduler.add(b)
    assert list(step_of(scheduler).prefill) == a
    scheduler.update_prefill(a[0].prompt, PrefillOutput(2))
    assert list(step_of(scheduler).prefill) == a, "until it is done"
    finish_prefill(scheduler, a)
    assert list(step_of(scheduler).prefill) == b


def test_a_short_prompt_passes_a_long_one_in_progress(scheduler):
    long, short = rows_of(spec("long", 5000)), rows_of(spec("short", 10))
    scheduler.add(long)
    assert list(step_of(scheduler).prefill) == long
    scheduler.update_prefill(long[0].prompt, PrefillOutput(64))
    scheduler.add(short)
    assert list(step_of(scheduler).prefill) == short
    finish_prefill(scheduler, short)
    assert list(step_of(scheduler).prefill) == long and long[0].prompt.num_prefilled == 64


def test_a_long_prompt_waits_in_the_queue_while_another_one_is_in_progress(scheduler):
    for name in ("a", "b", "c"):
        scheduler.add(rows_of(spec(name, 5000)))
    step_of(scheduler)
    assert len(scheduler.prefills.in_progress) == 1 and scheduler.num_waiting == 2, "its memory serves others meanwhile"


def test_the_oldest_prompt_in_progress_keeps_a_third_of_the_time():
    scheduler = scheduler_of(max_running=8)
    for num_tokens in (100, 200, 400, 800):
        measure(scheduler, num_tokens / 1000, num_tokens)
    long, num_chunks = rows_of(spec("long", 90_000)), {"long": 0, "other": 0}
    scheduler.add(long)
    step_of(scheduler)
    scheduler.update_prefill(long[0].prompt, PrefillOutput(100))
    for i in range(300):
        if len(scheduler.prefills.in_progress) == 1:
            scheduler.add(rows_of(spec(f"other {i}", 2000)))
        rows = list(step_of(scheduler).prefill)
        num_chunks[rows[0].spec.request_id.split()[0]] += 1
        if rows[0].prompt.num_left <= 100:
            finish_prefill(scheduler, rows)
            scheduler.abort(rows[0].spec.request_id)
        else:
            scheduler.update_prefill(rows[0].prompt, PrefillOutput(100))
            scheduler.prefills.record([PromptChunk(rows[0], 100)], 0.1, 0.1)
    assert num_chunks["long"] / 300 == pytest.approx(1 / 3, abs=0.05)


def test_the_shortest_prompt_is_first_among_those_that_wait():
    scheduler = scheduler_of("shortest_first")
    for name, num_prompt in {"long": 900, "short": 10, "middle": 300, "equal": 300}.items():
        scheduler.add(rows_of(spec(name, num_prompt)))
    assert admitted(scheduler) == ["short", "middle", "equal", "long"]


def test_the_smallest_priority_is_first_and_equals_in_the_order_of_arrival():
    scheduler = scheduler_of("priority")
    for name, priority in {"b": 1, "c": 1, "z": 7, "a": -3}.items():
        scheduler.add(rows_of(spec(name, priority=priority)))
    assert admitted(scheduler) == ["a", "b", "c", "z"]


@pytest.mark.parametrize(
    ("policy", "late"),
    [
        ("shortest_first", {"num_prompt": 1000}),
        ("priority", {"num_prompt": 2000, "priority": -1}),
        ("fifo", {"num_prompt": 2000, "priority": -1}),
    ],
)
def test_waiting_counts_as_a_thousand_tokens_or_one_priority_per_ageing_s(policy, late):
    for waited_s, order in ((9.9, ["late", "early"]), (10.1, ["early", "late"])):
        clock = Clock()
        scheduler = scheduler_of(policy, clock, scheduler={"ageing_s": 10.0})
        scheduler.add(rows_of(spec("early", num_prompt=2000)))
        clock.advance(waited_s)
        scheduler.add(rows_of(spec("late", **late)))
        assert admitted(scheduler) == (order if policy != "fifo" else ["early", "late"])


@pytest.mark.parametrize("policy", ["shortest_first", "priority"])
def test_a_long_low_priority_request_is_not_starved_by_a_stream_of_better_ones(policy):
    clock = Clock()
    scheduler = scheduler_of(policy, clock, max_running=1, scheduler={"ageing_s": 1.0})
    scheduler.add(rows_of(spec("poor", num_prompt=3000, priority=3)))
    order = []
    for second in range(10):
        scheduler.add(rows_of(spec(f"rich {second}")))
        [row] = step_of(scheduler).prefill
        order.append(row.spec.request_id)
        finish_prefill(scheduler, [row])
        scheduler.abort(order[-1])
        clock.advance(1.0)
    assert "poor" in order[2:5]


def test_chunks_are_small_while_rows_decode_and_large_while_none_does(scheduler):
    for num_tokens in (100, 200, 400, 800):
        measure(scheduler, num_tokens / 1e6, num_tokens)
    a, b = rows_of(spec("a", 500)), rows_of(spec("b", 500))
    scheduler.add(a)
    work = step_of(scheduler)
    assert (work.decode, work.max_prefill_tokens) == (False, 100)
    finish_prefill(scheduler, a)
    scheduler.add(b)
    work = step_of(scheduler)
    assert (work.decode, list(work.prefill), work.max_prefill_tokens) == (True, b, 20)


def test_rows_and_their_drafts_are_subtracted_from_the_tokens_of_a_chunk():
    scheduler = scheduler_of(max_running=64, prefill_chunk_tokens=100, prefill_chunk_tokens_busy=90)
    for num_tokens in (100, 200, 400, 800):
        measure(scheduler, num_tokens / 1e6, num_tokens)
    start(scheduler, spec("a", n=10))
    scheduler.add(rows_of(spec("long", 50_000)))
    assert step_of(scheduler).max_prefill_tokens == 90
    assert step_of(scheduler, num_draft_tokens=1).max_prefill_tokens == 80
    assert step_of(scheduler, num_draft_tokens=3).max_prefill_tokens == 60
    assert step_of(scheduler, num_draft_tokens=9).max_prefill_tokens == MIN_PREFILL_TOKENS


def measure(scheduler: Scheduler, seconds: float, num_tokens: int = 100) -> None:
    """A chunk of a row that is not the scheduler's."""
    prompt = Prompt(rows_of(spec("measured", num_tokens)), arrived_s=0.0, rank=0.0, num_prefilled=num_tokens)
    scheduler.prefills.record([PromptChunk(prompt.row, num_tokens)], 0.0, seconds)


def test_a_chunk_is_predicted_to_take_no_longer_than_the_maximum_stall():
    limits = {"prefill_chunk_tokens": 4000, "prefill_chunk_tokens_busy": 1000, "scheduler": {"max_stall_s": 0.5}}
    scheduler = scheduler_of(**limits)
    start(scheduler, spec("a"))
    scheduler.add(rows_of(spec("long", 50_000)))
    assert step_of(scheduler).max_prefill_tokens == 64, "nothing is known yet"
    for num_tokens in (100, 200, 400, 800):
        measure(scheduler, num_tokens / 1000, num_tokens)
    assert step_of(scheduler).max_prefill_tokens == 448, "500, with three significant bits"
    measure(scheduler, 20.0)
    assert step_of(scheduler).max_prefill_tokens == 448, "a single slow chunk"
    for num_tokens in (16, 32, 64, 128) * 10:
        measure(scheduler, num_tokens / 10, num_tokens)
    assert step_of(scheduler).max_prefill_tokens == MIN_PREFILL_TOKENS, "it goes on, however slow"


def test_a_chunk_has_a_time_limit_while_no_row_decodes():
    scheduler = scheduler_of(prefill_chunk_tokens=4000, step_timeout_s=120)
    scheduler.add(rows_of(spec("long", 50_000)))
    for num_tokens in (100, 200, 400, 800):
        measure(scheduler, num_tokens / 1000, num_tokens)
    assert step_of(scheduler).max_prefill_tokens == 224, "250, with three significant bits"
    for num_tokens in (2, 4, 8, 16) * 10:
        measure(scheduler, num_tokens * 4.0, num_tokens)
    assert step_of(scheduler).max_prefill_tokens == pytest.approx(120 / 4 / 4.0, abs=1), "far from step_timeout_s"


def test_a_full_batch_keeps_the_next_request_waiting_until_a_row_is_aborted(scheduler):
    start(scheduler, spec("a"))
    start(scheduler, spec("b"))
    c = rows_of(spec("c"))
    scheduler.add(c)
    assert not step_of(scheduler).prefill
    assert scheduler.num_waiting == 1
    scheduler.abort("a")
    work = step_of(scheduler)
    assert work.drop == ["a/0"] and list(work.prefill) == c


def test_a_stop_token_ends_the_row_and_is_not_delivered(scheduler):
    start(scheduler, spec("a"))
    chunk = scheduler.update_decode({"a/0": out(STOP)})["a/0"]
    assert chunk.token_ids == () and chunk.finish_reason is FinishReason.STOP
    assert step_of(scheduler).drop == ["a/0"]


def test_tokens_after_the_end_are_not_delivered(scheduler):
    start(scheduler, spec("a", max_tokens=3))
    start(scheduler, spec("b", max_tokens=9))
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(3))
    chunks = scheduler.update_decode({"a/0": out(5, 6, 8), "b/0": out(5, STOP, 6, logprobs=logprobs)})
    assert chunks["a/0"].token_ids == (5, 6) and chunks["a/0"].finish_reason is FinishReason.LENGTH
    assert chunks["b/0"].token_ids == (5,) and chunks["b/0"].finish_reason is FinishReason.STOP
    assert chunks["b/0"].logprobs == logprobs[:1]


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "num_accepted"), [((5, 6, 8), 30, 2), ((5, STOP, 8), 30, 1), ((5, 6, 8), 2, 1)]
)
def test_drafts_count_as_accepted_only_when_they_are_part_of_the_output(scheduler, token_ids, max_tokens, num_accepted):
    start(scheduler, spec("a", max_tokens=max_tokens))
    chunk = scheduler.update_decode({"a/0": out(*token_ids, num_drafted=3, num_accepted=2)})["a/0"]
    assert (chunk.num_drafted, chunk.num_accepted) == (3, num_accepted)
    assert (scheduler._stats.num_drafted, scheduler._stats.num_accepted) == (3, num_accepted)
    assert scheduler._stats.num_output_tokens == 1 + len(chunk.token_ids)


@pytest.mark.parametrize("output", [out(NO_TOKEN), out(5, error="the grammar cannot go on")])
def test_a_row_that_fails_fails_alone(scheduler, output):
    start(scheduler, spec("a"))
    start(scheduler, spec("b"))
    chunks = scheduler.update_decode({"a/0": output, "b/0": out(5)})
    assert chunks["a/0"].finish_reason is FinishReason.ERROR and chunks["a/0"].token_ids == ()
    assert chunks["a/0"].error == (output.error or "the highest logit is not finite")
    assert chunks["b/0"].token_ids == (5,) and chunks["b/0"].finish_reason is None
    assert step_of(scheduler).drop == ["a/0"] and scheduler._stats.num_failed == 1


@pytest.mark.parametrize("when", ["waiting", "prefill", "running"])
def test_an_aborted_request_is_removed_from_the_queue_the_prefills_or_the_batch(scheduler, when):
    if when == "running":
        start(scheduler, spec("a"))
    else:
        for name in ("a",) if when == "prefill" else ("b", "a"):
            scheduler.add(rows_of(spec(name, 5000)))
        step_of(scheduler)
    for name in ("a", "a", "never heard of"):
        scheduler.abort(name)
    work = step_of(scheduler)
    assert work.drop == ([] if when == "waiting" else ["a/0"])
    assert all(row.spec.request_id != "a" for row in work.prefill) and scheduler.num_waiting == 0
    assert scheduler.update_decode({"a/0": out(7)}) == {}, "a token that was on its way is dropped"
    assert scheduler._stats.num_aborted == 1


def test_the_scheduler_has_work_until_finished_rows_are_dropped(scheduler):
    assert not scheduler.has_work
    start(scheduler, spec("b", max_tokens=2))
    scheduler.update_decode({"b/0": out(7)})
    assert scheduler.has_work, "the row must still be dropped"
    step_of(scheduler)
    assert not scheduler.has_work and scheduler._rows == {}


def test_thousands_of_waiting_requests_are_admitted_in_order():
    scheduler = scheduler_of("shortest_first", max_running=1)
    lengths = [(i * 7919) % 5000 + 1 for i in range(3000)]
    for i, length in enumerate(lengths):
        scheduler.add(rows_of(spec(str(i), num_prompt=length)))
    order = [lengths[int(name)] for name in admitted(scheduler)]
    assert len(order) == 3000 and all(a <= b for a, b in pairwise(order))
