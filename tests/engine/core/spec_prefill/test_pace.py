"""Predicted seconds of scoring a prompt, from those of other prompts."""

import pytest

from engine.core.spec_prefill.pace import Pace


def measured(a: float, b: float, chunks: list[tuple[int, int]]) -> Pace:
    """Return the pace of a draft that takes `a` seconds per token and `b` per pair of tokens."""
    pace = Pace()
    for start, end in chunks:
        pace.record(start, end, a * (end - start) + b * (end * end - start * start) / 2)
    return pace


CHUNKS = [(start, start + 512) for start in range(0, 4096, 512)]


@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.0), (0.0, 1e-7), (2e-4, 3e-8)])
def test_the_time_of_long_prompts_is_predicted_from_shorter_ones(a, b):
    pace = measured(a, b, CHUNKS)
    assert pace.seconds(0, 32768) == pytest.approx(a * 32768 + b * 32768**2 / 2, rel=1e-3)
    parts = pace.seconds(0, 1000) + pace.seconds(1000, 5000)
    assert parts == pytest.approx(pace.seconds(0, 5000))


def test_too_few_measurements_predict_zero_seconds():
    pace = measured(1e-3, 0, CHUNKS[:2])
    assert pace.seconds(0, 10**6) == 0.0
    pace.record(0, 512, 0.5)
    assert pace.seconds(0, 1000) > 0
    assert pace.seconds(1000, 1000) == pace.seconds(1000, 10) == 0.0


def test_equal_chunks_predict_their_measured_rate():
    pace = measured(1e-3, 0, [(0, 512)] * 5)
    assert pace.seconds(0, 1024) == pytest.approx(1.024)


def test_predictions_from_noisy_measurements_are_positive():
    pace = Pace()
    for (start, end), seconds in zip(CHUNKS, [1.0, 0.9, 0.7, 0.8, 0.5, 0.6, 0.4, 0.3], strict=True):
        pace.record(start, end, seconds)
    assert pace.seconds(0, 512) > 0 and pace.seconds(30_000, 32_000) > 0


def test_newer_measurements_outweigh_older_ones():
    pace = measured(1e-3, 0, CHUNKS * 10)
    for start, end in CHUNKS * 10:
        pace.record(start, end, 3e-3 * (end - start))
    assert pace.seconds(0, 8192) == pytest.approx(3e-3 * 8192, rel=0.05)


def test_refused_prompts_lower_predictions_and_leave_later_measurements_alone():
    pace = measured(1e-3, 1e-6, CHUNKS * 10)
    before = pace.seconds(0, 8192)
    for _ in range(10):
        pace.lower()
    assert pace.seconds(0, 8192) == pytest.approx(before * 0.98**10)
    for start, end in CHUNKS * 10:
        pace.record(start, end, 1e-3 * (end - start) + 1e-6 * (end * end - start * start) / 2)
    assert pace.seconds(0, 8192) == pytest.approx(before, rel=0.05)
