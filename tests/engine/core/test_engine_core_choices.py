"""Several answers to one request: one prefill, then rows of their own."""

import numpy as np
import pytest

from engine.config import EngineConfig, PrefixCacheConfig
from engine.core.runner import PrefillOutput
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.engine.core.rows import finish_prefill, out, rows_of, scheduler_of, spec, start, step_of
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, FakeRunner, answer


def request(request_id: str, n: int, max_tokens: int = 12, seed: int = 1, **sampling) -> EngineRequest:
    params = SamplingParams(max_tokens, seed=seed, **sampling)
    return EngineRequest(request_id, np.arange(40, dtype=np.int32), params, (STOP,), num_choices=n)


def test_choices_share_one_prefill_and_are_sampled_each_with_its_own_seed():
    runner = FakeRunner()
    driver = Driver(runner, EngineConfig(prefill_chunk_tokens=16, prefix_cache=PrefixCacheConfig(enabled=False)))
    tokens = driver.run({0: [request("r", 3)]})
    assert tokens == {"r": answer(request("r", 3)), **{f"r/{i}": answer(request("r", 3), i) for i in (1, 2)}}
    assert len({tuple(ids) for ids in tokens.values()}) == 3
    assert [call for call in runner.calls if call[0] == "prefill"] == [("prefill", "r/0", num) for num in (16, 16, 8)]
    assert driver.core.stats.num_prompt_tokens == 40 and driver.core.stats.num_finished == 3


def test_the_first_choice_gets_the_same_tokens_as_a_single_choice():
    alone = Driver(FakeRunner()).run({0: [request("r", 1)]})["r"]
    assert Driver(FakeRunner()).run({0: [request("r", 4)]})["r"] == alone


def test_a_request_waits_until_all_its_choices_have_room():
    scheduler = scheduler_of(max_running=4)
    start(scheduler, spec("a", n=2))
    three, one = rows_of(spec("three", n=3)), rows_of(spec("one"))
    scheduler.add(three)
    scheduler.add(one)
    assert not step_of(scheduler).prefill, "no later request passes: the wide one would wait for ever"
    scheduler.update_decode({"a/1": out(2)})
    work = step_of(scheduler)
    assert list(work.prefill) == three and work.drop == ["a/1"]
    assert scheduler.num_running == 4


def test_rows_in_prefill_count_as_running():
    scheduler = scheduler_of(max_running=4)
    scheduler.add(rows_of(spec("a", n=3)))
    step_of(scheduler)
    assert (scheduler.num_running, scheduler.num_decoding) == (3, 0)


def test_each_choice_ends_on_its_own():
    runner = FakeRunner()
    sampled = request("r", 3)
    rows = rows_of(sampled)
    runner.stops_at = {rows[0].sampling.seed: 4, rows[1].sampling.seed: 7}
    runner.errors = {}
    driver = Driver(runner)
    tokens = driver.run({0: [sampled]})
    assert [len(tokens[name]) for name in ("r", "r/1", "r/2")] == [4, 7, 12]
    assert driver.finish == {"r": FinishReason.STOP, "r/1": FinishReason.STOP, "r/2": FinishReason.LENGTH}
    assert not runner.rows


def test_a_choice_that_fails_fails_alone():
    runner = FakeRunner()
    runner.errors = {"r/1": "the grammar cannot go on"}
    driver = Driver(runner)
    tokens = driver.run({0: [request("r", 3)]})
    assert driver.finish == {"r": FinishReason.LENGTH, "r/1": FinishReason.ERROR, "r/2": FinishReason.LENGTH}
    assert driver.errors["r/1"] == "the grammar cannot go on" and tokens["r/2"] == answer(request("r", 3), 2)


@pytest.mark.parametrize("when", ["waiting", "prefill", "running"])
def test_an_abort_ends_all_choices(when):
    scheduler = scheduler_of(max_running=4)
    rows = rows_of(spec("r", n=3, num_prompt=40))
    scheduler.add(rows)
    if when != "waiting":
        step_of(scheduler)
    if when == "running":
        finish_prefill(scheduler, rows)
    scheduler.abort("r")
    work = step_of(scheduler)
    assert work.drop == ([] if when == "waiting" else ["r/0", "r/1", "r/2"])
    assert not work.prefill and not scheduler.has_work and scheduler._rows == {}
    assert scheduler._stats.num_aborted == 3


def test_a_prompt_that_fails_fails_all_its_choices():
    runner = FakeRunner()
    runner.broken = {"prefill"}
    driver = Driver(runner)
    driver.run({0: [request("r", 2)]})
    assert driver.finish == {"r": FinishReason.ERROR, "r/1": FinishReason.ERROR}
    assert driver.core.failed_steps_in_a_row == 1 and not runner.prompts


def test_a_prefill_output_that_lacks_a_choice_is_rejected_before_any_row_changes():
    scheduler = scheduler_of()
    rows = rows_of(spec("r", n=2))
    scheduler.add(rows)
    step_of(scheduler)
    with pytest.raises(KeyError):
        scheduler.update_prefill(rows[0].prompt, PrefillOutput(4, {"r/0": out(7)}))
    chunks = scheduler.fail_prefill(rows[0].prompt, "prefill failed")
    assert sorted(chunks) == ["r/0", "r/1"] and step_of(scheduler).drop == ["r/0", "r/1"]


def test_logprobs_come_one_per_token_and_choice():
    driver = Driver(FakeRunner(max_draft_tokens=2), EngineConfig.model_validate({"mtp": {"max_draft_tokens": 2}}))
    driver.run({0: [request("r", 2, max_tokens=8, logprobs=0)]})
    for name in ("r", "r/1"):
        logprobs = [-entry.logprob for chunk in driver.chunks[name] for entry in chunk.logprobs]
        assert logprobs == list(range(8))
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in driver.chunks[name])


def test_each_choice_gets_its_own_matcher():
    class Matcher:
        def masks(self, draft=()):
            raise NotImplementedError

        def advance(self, token_ids):
            raise NotImplementedError

        def fork(self):
            raise NotImplementedError

    runner = FakeRunner()
    driver = Driver(runner)
    matchers = [Matcher(), Matcher()]
    driver.core.add_request(request("r", 2), matchers)
    driver.core.step()
    assert [row.matcher for row in runner.rows.values()] == matchers
