"""Histograms: every value is in one bucket."""

from hypothesis import given
from hypothesis import strategies as st

from engine.histogram import Histogram, steps_1_2_5

BOUNDS = (0.5, 1, 2.5)


@given(st.lists(st.floats(0, 4)))
def test_every_value_is_in_the_first_bucket_whose_bound_is_not_smaller(values: list[float]):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    assert sum(histogram.counts) == len(values)
    for index, bound in enumerate(BOUNDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert abs(histogram.total - sum(values)) < 1e-9


def test_a_value_can_be_counted_several_times_and_a_copy_is_independent():
    histogram = Histogram(BOUNDS)
    histogram.observe(1, num=3)
    copy = histogram.copy()
    histogram.observe(9)
    assert (copy.counts, copy.total, copy.bounds) == ([0, 3, 0, 0], 3, BOUNDS)
    assert (histogram.counts, histogram.total) == ([0, 3, 0, 1], 12)


def test_steps_end_at_the_largest():
    assert steps_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)
    assert steps_1_2_5(30) == (1, 2, 5, 10, 20)
