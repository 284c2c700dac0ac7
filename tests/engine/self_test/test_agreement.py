"""Rounding is told from faults: what each precision explains, and what no precision does."""

import pytest

from engine.protocol import TokenLogprobs
from engine.self_test.agreement import Answer, Rounding, agree, first_difference
from engine.self_test.outcome import Status

EXACT = Rounding("float32", 2.0**-24)
LOW = Rounding("bfloat16", 2.0**-8, measured=0.05)


def answer(*logprobs: dict[int, float]) -> Answer:
    """One dictionary per token: logprobs by token, the best of which is chosen."""
    tables = [sorted(one.items(), key=lambda item: -item[1]) for one in logprobs]
    tokens = tuple(table[0][0] for table in tables)
    return Answer(tokens, tuple(TokenLogprobs(table[0][1], tuple(table)) for table in tables))


def status(reference: Answer, other: Answer, rounding: Rounding) -> Status:
    return agree({"r": reference}, {"r": other}).outcome("check", rounding).status


SURE = {1: -0.1, 2: -3.0}
CLOSE, TURNED = {1: -0.70, 2: -0.72}, {1: -0.72, 2: -0.70}


def test_equal_answers_pass_in_any_precision():
    for rounding in (EXACT, LOW):
        assert status(answer(SURE, CLOSE), answer(SURE, CLOSE), rounding) is Status.PASS


def test_another_token_within_rounding_is_a_warning_in_low_precision_and_a_failure_in_float32():
    assert first_difference(answer(CLOSE), answer(TURNED)) == (0, pytest.approx(0.04))
    assert status(answer(CLOSE), answer(TURNED), LOW) is Status.WARN
    assert status(answer(CLOSE), answer(TURNED), EXACT) is Status.FAIL


def test_another_token_that_rounding_cannot_explain_is_a_failure():
    assert status(answer(SURE, CLOSE), answer({1: -3.0, 2: -0.1}, CLOSE), LOW) is Status.FAIL


def test_equal_tokens_with_other_logprobs_are_a_failure():
    moved = {1: -0.1 - 2 * EXACT.limit, 2: -3.0}
    assert status(answer(SURE), answer(moved), EXACT) is Status.FAIL
    assert status(answer(SURE), answer(moved), LOW) is Status.PASS
    assert status(answer(SURE), answer({1: -0.1, 2: -3.0 - 2 * LOW.limit}), LOW) is Status.FAIL


def test_tokens_after_the_first_other_one_are_not_compared():
    found = agree({"r": answer(CLOSE, SURE, SURE)}, {"r": answer(TURNED, {7: -1.0}, {8: -1.0})})
    assert (found.num_equal, found.num_compared, found.num_tokens) == (0, 0, 3)
    assert found.outcome("check", LOW).status is Status.WARN


def test_failed_missing_and_shorter_answers_are_failures():
    whole = answer(SURE, SURE)
    for other in ({}, {"r": answer(SURE)}, {"r": Answer((), error="decode step failed")}):
        assert agree({"r": whole}, other).outcome("check", LOW).status is Status.FAIL


def test_no_measurement_excuses_more_than_the_precision_explains():
    assert Rounding("bfloat16", 2.0**-8, measured=7.0).limit == 1.0
    assert Rounding("float16", 2.0**-11, measured=7.0).limit == 0.125
    assert Rounding("bfloat16", 2.0**-8, measured=0.1, size=2.0).limit == 0.4
    assert Rounding("bfloat16", 2.0**-8, size=2.0).limit == 32 * 2.0**-8
    assert Rounding("float32", 2.0**-24, measured=7.0).limit == 1e-3
    assert Rounding("float32", 2.0**-24, measured=1e-6).limit == pytest.approx(1.6e-5)


def test_float32_whose_products_are_shortened_is_low_precision():
    assert not Rounding("float32", 2.0**-11).is_exact
