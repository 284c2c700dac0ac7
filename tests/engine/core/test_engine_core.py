"""The engine's promise about tokens: alone = batched, whatever joins, leaves or fails meanwhile."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer

SMALL_CHUNKS = EngineConfig(prefill_chunk_tokens=64, prefill_chunk_tokens_busy=64)


@pytest.fixture(scope="session")
def mixed(make_request, picture) -> list[EngineRequest]:
    """Eight requests: text and pictures, greedy and sampled, long and short."""
    red, blue = picture("red"), picture("blue", "square", (160, 96))
    return [
        make_request("sum", "What is 12 + 30?"),
        make_request("red", "What is in the image?", (red,)),
        make_request("story", "Tell me a story.", max_tokens=40, stops=False),
        make_request("hot", "Tell me a story.", max_tokens=25, stops=False, temperature=1.2, seed=7),
        make_request("two", "What is in the images?", (red, blue)),
        make_request("nucleus", "Hello!", max_tokens=20, stops=False, temperature=1.5, seed=8, top_p=0.9, top_k=40),
        make_request("one", "Hello!", max_tokens=1),
        make_request("blue", "What color is the square?", (blue,), max_tokens=20, stops=False),
    ]


@pytest.fixture(scope="session")
def alone(runner, mixed) -> dict[str, list[int]]:
    return {request.request_id: Driver(runner).run({0: [request]})[request.request_id] for request in mixed}


def test_the_demo_model_answers_sums_and_images_correctly(alone, tokenizer):
    def text(request_id: str) -> str:
        detokenizer = tokenizer.detokenizer(())
        return detokenizer.push(alone[request_id]) + detokenizer.finish()

    assert text("sum") == "12 + 30 = 42"
    assert "red circle" in text("red")
    assert "red circle" in text("two") and "blue square" in text("two")


@pytest.mark.parametrize("steps", [(0,) * 8, (12, 20, 10, 0, 5, 25, 15, 3)], ids=["at once", "shuffled"])
def test_a_request_in_a_batch_gets_the_same_tokens_as_alone(drive, mixed, alone, steps):
    arrivals: dict[int, list[EngineRequest]] = {}
    for step, request in zip(steps, mixed, strict=True):
        arrivals.setdefault(step, []).append(request)
    driver = drive(SMALL_CHUNKS)
    assert driver.run(arrivals) == alone
    assert driver.core.stats.max_rows_in_a_step > 1


def test_memory_is_freed_after_random_arrivals_and_aborts(drive, runner, mixed):
    before, driver = runner.memory(), None
    for seed in range(2):
        rng = np.random.default_rng(seed)
        requests = [replace(r, request_id=f"{r.request_id}-{seed}") for r in mixed]
        arrivals: dict[int, list[EngineRequest]] = {}
        aborts: dict[int, list[str]] = {}
        for request in requests:
            arrivals.setdefault(int(rng.integers(0, 20)), []).append(request)
            if rng.random() < 0.6:
                aborts.setdefault(int(rng.integers(0, 60)), []).append(request.request_id)
        driver = drive(SMALL_CHUNKS)
        driver.run(arrivals, aborts)
    gc.collect()  # the driver of the first round, which hangs in a cycle, and its cache with it
    after = runner.memory()
    assert after["decode_cache_bytes"] == after["prefill_cache_bytes"] == 0
    assert driver is not None
    assert after["active_bytes"] - before["active_bytes"] - driver.core.prefixes.store.num_bytes < 2**20
    assert driver.core.prefixes.store.num_bytes > 0
    driver.core.prefixes.clear()
    assert runner.memory()["active_bytes"] - before["active_bytes"] < 2**20


def test_a_late_request_does_not_wait_for_a_long_one(drive, make_request):
    driver = drive(EngineConfig(mtp="off"))
    long = make_request("long", "Tell me a story.", max_tokens=300, stops=False)
    driver.core.add_request(long)
    for _ in range(20):
        driver.core.step()
    driver.core.add_request(make_request("late", "What is 12 + 30?"))
    while "late" not in driver.finish:
        driver.core.step()
    assert "long" not in driver.finish
    assert len(driver.tokens["long"]) < 60
    driver.core.abort("long")
    driver.core.step()


def test_the_first_token_comes_with_the_last_chunk_of_the_prompt(drive, make_request):
    driver = drive()
    driver.core.add_request(make_request("r", "Hello!"))
    driver.core.step()
    assert len(driver.tokens["r"]) == 1
    driver.core.abort("r")
    driver.core.step()


def test_max_tokens_and_stop_tokens_end_a_row(drive, make_request, tokenizer):
    driver = drive()
    tokens = driver.run({0: [make_request("cut", "Hello!", max_tokens=3), make_request("whole", "Hello!")]})
    assert len(tokens["cut"]) == 3 and driver.finish["cut"] is FinishReason.LENGTH
    assert driver.finish["whole"] is FinishReason.STOP
    assert not set(tokens["whole"]) & set(tokenizer.stop_token_ids)
    assert tokens["whole"][:3] == tokens["cut"]


def test_a_model_without_explicit_positions_batches_exactly_too(drive, text_runner, make_request):
    requests = [
        make_request(f"r{i}", text, max_tokens=20, stops=False)
        for i, text in enumerate(["Hello!", "What is 7 + 5?", "Tell me a story.", "Count from 1 to 10."])
    ]
    alone = {r.request_id: drive(on=text_runner).run({0: [r]})[r.request_id] for r in requests}
    together = drive(SMALL_CHUNKS, on=text_runner).run({i * 3: [r] for i, r in enumerate(requests)})
    assert together == alone


class BrokenRunner(FakeRunner):
    """Works until it is told to break."""

    break_prefill_of: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []

    def prefill(self, rows, max_tokens):
        if rows[0].spec.request_id == self.break_prefill_of:
            raise ValueError("bad picture")
        return super().prefill(rows, max_tokens)

    def drop(self, row_ids, lent=None):
        super().drop(row_ids, lent)
        self.dropped += row_ids


def request_of(request_id: str) -> EngineRequest:
    return EngineRequest(request_id, np.arange(4, dtype=np.int32), SamplingParams(5), ())


@pytest.fixture
def broken() -> tuple[BrokenRunner, Driver]:
    runner = BrokenRunner()
    return runner, Driver(runner)


def test_a_prompt_that_fails_fails_alone(broken):
    runner, driver = broken
    runner.break_prefill_of = "bad"
    tokens = driver.run({0: [request_of("a"), request_of("bad"), request_of("b")]})
    assert driver.finish == {"a": FinishReason.LENGTH, "bad": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert tokens["a"] == tokens["b"] == answer(request_of("a"))
    assert "bad/0" in runner.dropped
    assert driver.core.stats.num_failed == 1 and driver.core.failed_steps_in_a_row == 0


def test_a_failed_step_fails_its_rows_at_once_and_no_others(broken):
    runner, driver = broken
    driver.core.add_request(request_of("a"))
    driver.core.step()
    runner.broken = {"decode"}
    driver.core.add_request(request_of("b"))
    driver.core.step()
    assert driver.finish == {"a": FinishReason.ERROR}
    assert driver.errors["a"] == "decode step failed: RuntimeError", "the library's words stay inside"
    runner.broken = set()
    driver.run({0: []})
    assert driver.finish["b"] is FinishReason.LENGTH


def test_failures_in_a_row_are_counted_and_a_good_step_resets_them(broken):
    runner, driver = broken
    runner.broken = {"prefill"}
    for _ in range(3):
        driver.core.add_request(request_of("bad"))
        driver.core.step()
        driver.finish.clear()
    assert driver.core.failed_steps_in_a_row == 3
    runner.broken = set()
    driver.run({0: [request_of("good")]})
    assert driver.core.failed_steps_in_a_row == 0


def test_a_prompt_that_always_fails_does_not_count_as_a_device_failure(broken):
    runner, driver = broken
    runner.break_prefill_of = "bad"
    for _ in range(3):
        driver.core.add_request(request_of("bad"))
        driver.core.step()
        assert driver.chunks["bad"][-1].retry_after_s is None
        driver.finish.clear()
    assert driver.core.failed_steps_in_a_row == 0


def test_a_failed_drop_fails_all_rows_and_the_engine_continues(broken):
    runner, driver = broken
    for request_id in "ab":
        driver.core.add_request(request_of(request_id))
        driver.core.step()
    runner.broken = {"drop"}
    driver.core.abort("a")
    driver.core.step()
    assert driver.finish == {"b": FinishReason.ERROR} and not runner.rows
    runner.broken = set()
    driver.run({0: [request_of("c")]})
    assert driver.finish["c"] is FinishReason.LENGTH


def test_unreadable_memory_figures_end_no_request(broken):
    runner, driver = broken
    runner.broken = {"memory"}
    assert driver.run({0: [request_of("a")]}) == {"a": answer(request_of("a"))}


def test_a_device_that_cannot_be_waited_for_does_not_end_the_engine(broken):
    runner, driver = broken
    runner.broken, runner.active_bytes = {"settled_bytes"}, 2**20
    assert driver.run({0: [request_of("a")]}) == {"a": answer(request_of("a"))}
    assert driver.core.budget.num_underestimates == 1


def test_a_request_with_more_images_than_placeholders_fails_alone_and_not_as_a_failed_step(
    drive, make_request, picture
):
    driver = drive()
    two_pictures_for_one = replace(make_request("bad", "What?", (picture("red"),)), images=(picture("red"),) * 2)
    tokens = driver.run({0: [make_request("good", "What is 12 + 30?"), two_pictures_for_one]})
    assert driver.finish["bad"] is FinishReason.ERROR and "its images have 32" in str(driver.errors["bad"])
    assert driver.finish["good"] is FinishReason.STOP and tokens["good"]
    assert driver.core.failed_steps_in_a_row == 0
