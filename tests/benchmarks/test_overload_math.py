import itertools
import random

import pytest

from tests.benchmarks.overload_figures import Refusal, Round, arrivals, figures, header, summary, tokens_between
from tests.support.sse import Answer, Exchange

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":8}}\n\ndata: [DONE]\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 3\r\n\r\n{}"


def answered(due: float, *times: float, end: bytes = USAGE) -> Exchange:
    """Eight tokens in as many pieces as there are times."""
    pieces = [(at, EVENT) for at in times]
    return Exchange(due, due, [(due, STREAM), *pieces, (times[-1], end)])


def refused(due: float, at: float) -> Exchange:
    return Exchange(due, due + 0.001, [(at, REFUSAL[:20]), (at, REFUSAL[20:])])


def test_arrivals_are_random_at_the_requested_rate_and_the_same_for_a_seed():
    due_s = arrivals(random.Random(1), rate=10, seconds=100)
    assert due_s == sorted(due_s) == arrivals(random.Random(1), rate=10, seconds=100)
    assert len(due_s) == pytest.approx(1000, rel=0.1) and due_s[0] > 0 and due_s[-1] < 100
    gaps = [b - a for a, b in itertools.pairwise(due_s)]
    assert max(gaps) > 0.4 and min(gaps) < 0.01, "they are not regular"


def test_tokens_of_an_answer_count_in_the_interval_of_their_arrival():
    answer = Answer(0.0, 0.0, [(1.0, "a"), (2.0, "b"), (3.0, "c"), (4.0, "d")], 5, 8, "stop", None)
    assert tokens_between([answer], 0, 10) == 8
    assert tokens_between([answer, answer], 2.0, 4.0) == 8, "the end does not count"
    assert tokens_between([Answer(0.0, 0.0, [], 5, 0, "stop", None)], 0, 10) == 0


def test_goodput_counts_tokens_of_completed_answers_after_the_ramp():
    broken_off = answered(10.0, 12.0, 13.0, end=b"")
    result = figures("1 x", [answered(10.0, 11.0, 13.0), broken_off, refused(11.0, 11.05)], ramp_s=2.0, seconds=6.0)
    assert result.goodput == 4 / 4.0, "the second half of eight tokens, in four seconds"
    assert len(result.answers) == 1 and result.errors == ["the stream broke off"]
    (refusal,) = result.refusals
    assert (refusal.status, refusal.retry_after) == (429, "3") and refusal.seconds == pytest.approx(0.05)


def test_failed_and_silent_exchanges_are_errors_and_no_refusals():
    failed = Exchange(0.0, 0.0, [(1.0, b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}")])
    silent = Exchange(0.0, 0.0, [(1.0, REFUSAL)], error="no end within 120 s")
    result = figures("4 x", [failed, silent], ramp_s=1.0, seconds=2.0)
    assert result.refusals == result.answers == [] and len(result.errors) == 2


def test_a_header_is_found_whatever_its_case_and_however_the_reads_are_cut():
    assert header(refused(0.0, 1.0), "retry-after") == "3"
    assert header(answered(0.0, 1.0), "retry-after") is None


def of_arm(arm: str, goodput: float, num_refused: int = 0) -> Round:
    answer = Answer(0.0, 0.0, [(0.5, "a")], 5, 8, "stop", None)
    return Round(arm, goodput, [answer], [Refusal(429, 0.02, "2")] * num_refused, [], [0.001])


def test_a_summary_compares_within_rounds_and_shows_every_retry_after():
    rounds = [of_arm("closed", 100), of_arm("1 x", 90), of_arm("4 x", 99, 3)]
    rounds += [of_arm("closed", 200), of_arm("1 x", 190), of_arm("4 x", 190, 1)]
    report = summary(rounds, "4 x")
    assert report.lines[:2] == ["goodput 4 x / 1 x: 1.050 [1.000 1.100]", "goodput 4 x / closed: 0.970 [0.950 0.990]"]
    assert report.lines[2:] == ["4 x: 4 refused with 429, Retry-After 2"]
    closed, _, overload = report.arms
    assert closed["refused"] == "0 [0 0] %" and closed["refusal p50/p99/max, ms"] == "-"
    assert overload["refused"] == "62 [50 75] %" and overload["refusal p50/p99/max, ms"] == "20 / 20 / 20"
    assert overload["TTFT p50/p99, ms"] == "500 / 500" and overload["goodput, tokens/s"] == "144 [99 190]"
    assert report.errors == []
