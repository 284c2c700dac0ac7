"""Quotes of a real core: what is cached, who goes before, what is booked, and what a place costs."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.quoting.load import OPEN_S, PromptLeft
from engine.core.quoting.quoter import BOOKING_S, _booked
from engine.core.quoting.residents import RESIDENT_S
from engine.core.scheduler_output import Published
from engine.placement import ConversationKeys, Question
from engine.protocol import Boundary, EngineRequest, SamplingParams
from tests.benchmarks.sim_runner import GENERATION_TOKENS, MAC_4B, MAC_27B, STOP, ClockRunner, Machine
from tests.support.clock import Clock

SYSTEM_TOKENS = 2_000


class Engine:
    """A core over a virtual clock, and conversations whose turns it computes."""

    def __init__(self, machine: Machine = MAC_27B, **config):
        self.clock = Clock(0.0)
        self.runner = ClockRunner(machine, self.clock)
        self.core = EngineCore(EngineConfig.model_validate(config), self.runner, self._publish, self.clock)
        self.outputs: dict[str, list[int]] = {}
        self._rng = np.random.default_rng(0)
        self.system = self.tokens(SYSTEM_TOKENS)

    def tokens(self, num_tokens: int) -> np.ndarray:
        return self._rng.integers(STOP + 1, 1000, num_tokens, dtype=np.int32)

    def send(self, request_id: str, token_ids: np.ndarray, keys: ConversationKeys | None, num_answer: int = 40) -> None:
        """Queue a prompt that begins with the system part; it ends with a generation prompt."""
        ends = Boundary("system", SYSTEM_TOKENS), Boundary("turn", len(token_ids) - GENERATION_TOKENS)
        self.runner.answers[request_id] = [*self.tokens(num_answer).tolist(), STOP]
        spec = EngineRequest(request_id, token_ids, SamplingParams(1000), (STOP,), boundaries=ends, keys=keys)
        self.core.add_request(spec)

    def finish(self) -> None:
        while self.core.has_work:
            self.core.step()

    def prompt(self, num_tokens: int) -> np.ndarray:
        return np.concatenate([self.system, self.tokens(num_tokens - SYSTEM_TOKENS)])

    def quote(self, question: Question):
        return self.core.quoter.quote(question)

    def _publish(self, chunks: Published) -> None:
        for row_id, chunk in chunks.items():
            self.outputs.setdefault(row_id.rpartition("/")[0], []).extend(chunk.token_ids)


def keys(conversation: int, *turns: int) -> ConversationKeys:
    """Keys of a conversation; its turns are given the last one first."""
    return ConversationKeys(1, conversation, turns)


def question(of: ConversationKeys, num_tokens: int, request_id: str = "q", num_choices: int = 1) -> Question:
    return Question(request_id, of, num_tokens, num_choices)


def test_cached_tokens_are_those_of_the_turn_and_of_its_answer():
    engine = Engine()
    assert engine.quote(question(keys(10, 11), 5_000)).cached_tokens == 0
    engine.send("a", first := engine.prompt(5_000), keys(10, 11))
    while not engine.core.scheduler.num_decoding:
        engine.core.step()
    again = engine.quote(question(keys(10, 11), 5_000))
    assert again.cached_tokens == 5_000 - GENERATION_TOKENS and again.is_resident
    engine.finish()
    assert engine.quote(question(keys(10, 11), 5_000)).cached_tokens == 5_000 - GENERATION_TOKENS, "the same turn again"
    after = engine.quote(question(keys(10, 13, 12, 11), 6_000))
    second = np.concatenate([first, engine.outputs["a"], engine.tokens(955)]).astype(np.int32)
    assert after.cached_tokens == 5_000 + 40 and len(second) == 5_995
    engine.send("b", second, keys(10, 13, 12, 11))
    engine.finish()
    assert engine.core.stats.num_cached_tokens == after.cached_tokens, "the quote said what was found"


def test_other_conversations_find_the_system_part():
    engine = Engine()
    engine.send("a", engine.prompt(5_000), keys(10, 11))
    engine.finish()
    other = engine.quote(question(keys(20, 21), 5_000))
    assert other.cached_tokens == SYSTEM_TOKENS and not other.is_resident
    assert other.prefill_s == pytest.approx(engine.core.costs.prompt_s(SYSTEM_TOKENS, 5_000))
    assert engine.quote(question(replace(keys(20, 21), system=2), 5_000)).cached_tokens == 0


def test_evicted_snapshot_is_no_longer_found():
    engine = Engine()
    engine.send("a", engine.prompt(5_000), keys(10, 11))
    engine.finish()
    engine.core.free_evictable()
    assert engine.quote(question(keys(10, 11), 5_000)).cached_tokens == 0
    assert engine.quote(question(keys(10, 11), 5_000)).is_resident


def test_prompt_waits_for_those_that_are_computed_first_and_passes_much_longer_ones():
    engine = Engine()
    engine.send("long", engine.prompt(60_000), keys(10, 11))
    engine.core.step()
    engine.send("next", engine.prompt(50_000), keys(20, 21))
    costs = engine.core.costs
    same = engine.quote(question(keys(30, 31), 60_000))
    assert same.wait_s == pytest.approx(costs.prompt_s(0, 60_000) + costs.prompt_s(0, 50_000), rel=0.1)
    short = engine.quote(question(keys(40, 41), 1_000))
    assert short.wait_s < 3, "a prompt in progress that is longer gets a third of the time"


def test_full_decode_batch_makes_the_request_wait_for_the_end_of_a_row():
    engine = Engine(max_running=2)
    for name in "ab":
        engine.send(name, engine.prompt(2_500), keys(ord(name), ord(name) + 100), num_answer=500)
    while engine.core.scheduler.num_decoding < 2:
        engine.core.step()
    engine.core.step()
    token_s = engine.core.costs.token_s(2)
    assert token_s is not None
    assert engine.quote(question(keys(1, 2), 2_500)).wait_s == pytest.approx(0.5 * 256 * token_s, rel=0.1)
    assert engine.quote(question(keys(1, 2), 2_500)).slowdown_s > 0


def test_requests_that_are_booked_fill_an_idle_engine_too():
    engine = Engine(max_running=4)
    engine.send("a", engine.prompt(5_000), keys(10, 11))
    engine.finish()
    after = engine.quote(question(keys(20, 30), 1))
    for i in range(4):
        before, asked = after, question(keys(20 + i, 30 + i), 1, str(i))
        assert before.wait_s == pytest.approx(i * before.prefill_s), "for the prompts before it alone"
        assert engine.core.quoter.book(asked) is None
        after = engine.quote(question(keys(21 + i, 31 + i), 1))
        assert after.seconds - before.seconds == pytest.approx(before.next_s, abs=1e-9)
    token_s = engine.core.costs.token_s(4)
    assert token_s is not None
    answer_s = engine.core.quoter._recorder.load.answer_tokens * token_s
    assert after.wait_s == pytest.approx(answer_s), "none of the four rows has begun"


@pytest.mark.parametrize(
    ("num_decoding", "num_booked", "answers"),
    [(2, 1, 0), (4, 0, 0.25), (4, 2, 0.75), (2, 2, 0.5), (1, 3, 1), (0, 4, 1), (0, 5, 1), (4, 4, 1.25), (0, 8, 1.25)],
)
def test_rows_that_decode_end_one_by_one_and_booked_rows_after_a_whole_answer(num_decoding, num_booked, answers):
    engine = Engine(max_running=4)
    engine.send("a", engine.prompt(2_500), keys(10, 11))
    engine.finish()
    load = replace(engine.core.quoter._recorder.load, num_decoding=num_decoding)
    booked = [PromptLeft(0, 1, 1, 0, float("-inf"))] * num_booked
    token_s = engine.core.costs.token_s(min(num_decoding + num_booked, 4))
    assert token_s is not None
    rows_s = engine.core.quoter._rows_s(question(keys(20, 30), 1), load, booked)
    assert rows_s / (load.answer_tokens * token_s) == pytest.approx(answers)


def test_a_queue_behind_full_memory_waits_for_as_many_rows_as_are_missing():
    engine = Engine()
    engine.send("a", engine.prompt(2_500), keys(10, 11))
    engine.finish()
    load, needs = engine.core.quoter._recorder.load, engine.core.budget.needs
    row_tokens = needs.request_bytes // 4 // needs.costs.token_bytes
    for i in range(20):
        assert engine.core.quoter.book(question(keys(20 + i, 40 + i), int(0.9 * row_tokens), str(i))) is None
    token_s = engine.core.costs.token_s(20)
    assert token_s is not None
    rows_s = engine.core.quoter._rows_s(
        question(keys(1, 2), int(0.9 * row_tokens)), load, [_booked(one) for one in engine.core.quoter.bookings.open()]
    )
    assert rows_s / (load.answer_tokens * token_s) == pytest.approx((21 * 0.9 - 4) / 4, rel=0.1)


def test_booking_counts_as_queued_until_its_request_arrives():
    engine = Engine()
    booked = question(keys(10, 11), 30_000, "a")
    assert engine.quote(booked).wait_s == 0 and engine.core.quoter.book(booked) is None
    other = question(keys(20, 21), 30_000)
    wait_s = engine.quote(other).wait_s
    assert wait_s == pytest.approx(engine.core.costs.prompt_s(0, 30_000)) and engine.core.quoter.num_booked == 1
    engine.send("a", engine.prompt(30_000), keys(10, 11))
    assert engine.quote(other).wait_s == pytest.approx(wait_s), "it counts once"
    assert engine.core.quoter.num_booked == 0
    engine.finish()
    assert engine.quote(other).wait_s == 0


def test_booking_whose_request_never_arrives_ends():
    engine = Engine()
    assert engine.core.quoter.book(question(keys(10, 11), 30_000, "a")) is None
    engine.clock.advance(BOOKING_S - 1)
    assert engine.quote(question(keys(20, 21), 30_000)).wait_s > 0
    engine.clock.advance(2)
    assert engine.quote(question(keys(20, 21), 30_000)).wait_s == engine.core.quoter.num_booked == 0


def test_booking_is_answered_with_a_new_quote_if_the_wait_has_grown():
    engine = Engine()
    asked = question(keys(10, 11), 30_000, "a")
    engine.quote(asked)
    assert engine.core.quoter.book(question(keys(20, 21), 30_000, "b")) is None
    changed = engine.core.quoter.book(asked)
    assert changed is not None and changed.wait_s > 2 and engine.core.quoter.num_booked == 1
    assert engine.core.quoter.book(asked) is None, "it is booked when it is asked for again"


def test_prompt_that_memory_never_holds_is_refused():
    engine = Engine(MAC_4B)
    too_long = question(keys(10, 11), 250_000)
    refused = engine.core.quoter.book(too_long)
    assert engine.quote(too_long).refusal == "memory" and refused is not None and refused.refusal == "memory"
    assert engine.quote(question(keys(10, 11), 60_000)).refusal is None


def test_newcomer_pays_for_the_place_that_residents_lose_and_residents_pay_nothing():
    engine = Engine(MAC_4B)
    newcomer = question(keys(90, 91), 30_000)
    prices = [engine.quote(newcomer).crowding_s]
    for number in range(3):
        name = f"r{number}"
        engine.send(name, engine.prompt(30_000), keys(number, 100 + number))
        engine.finish()
        prices.append(engine.quote(newcomer).crowding_s)
    assert prices[0] == prices[1] == 0 < prices[2] < prices[3]
    assert engine.quote(question(keys(2, 202, 102), 32_000)).crowding_s == 0
    engine.clock.advance(RESIDENT_S + 1)
    assert not engine.quote(question(keys(2, 202, 102), 32_000)).is_resident


def test_quotes_of_another_thread_while_steps_run_neither_fail_nor_change_tokens():
    def tokens_of(is_quoted: bool) -> dict[str, list[int]]:
        engine, errors, is_over = Engine(max_running=8), list[BaseException](), threading.Event()
        turns = [(f"c{i}", keys(i, 1000 + i), engine.prompt(2_500 + 100 * i)) for i in range(24)]

        def ask() -> None:
            number = 0
            try:
                while not is_over.is_set():
                    name, of, token_ids = turns[number % len(turns)]
                    engine.core.quoter.quote(question(of, len(token_ids), name))
                    engine.core.quoter.book(question(of, len(token_ids), f"{name}-{number}"))
                    engine.core.quoter.bookings.remove(f"{name}-{number - 3}")
                    number += 1
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        if is_quoted:
            thread.start()
        for name, of, token_ids in turns:
            engine.send(name, token_ids, of)
            engine.core.step()
        engine.finish()
        is_over.set()
        if is_quoted:
            thread.join()
        assert not errors
        return engine.outputs

    assert tokens_of(is_quoted=True) == tokens_of(is_quoted=False)


def test_newcomer_pays_for_sharing_the_device_with_the_turns_of_residents():
    """A node with much room is not chosen for all conversations: they would wait for each other's turns."""
    engine = Engine(replace(MAC_4B, memory_bytes=512 * 2**30))
    newcomer, resident = question(keys(90, 91), 30_000), question(keys(0, 100), 30_000)
    prices, own = [], []
    for turn in range(4):
        engine.send(f"r{turn}", engine.prompt(30_000), keys(0, 100 + turn), num_answer=400)
        engine.finish()
        prices.append(engine.quote(newcomer).slowdown_s)
        own.append(engine.quote(resident).slowdown_s)
    assert engine.quote(newcomer).crowding_s == 0 < prices[0]
    assert own == [0.0] * 4, "a resident pays nothing"
    engine.clock.advance(10 * OPEN_S)
    assert engine.quote(newcomer).slowdown_s < 0.01 * max(prices), "the node is idle"
