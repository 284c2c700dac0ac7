"""Figures over finished choices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.core.request_figures import RequestFigures
from engine.histogram import Histogram
from engine.timeline import Compiling, Decoded, Prefilled, Queued, RowTimeline


def row(num_tokens: int = 100, num_cached: int = 60, index: int = 0, num_choices: int = 2) -> Any:
    spec = SimpleNamespace(token_ids=np.zeros(num_tokens), num_choices=num_choices, num_output_tokens=50)
    return SimpleNamespace(spec=spec, num_cached=num_cached, index=index)


def timeline(**changes: Any) -> RowTimeline:
    phases = (
        Compiling(seconds=0.5, has_grammar=True),
        Queued(seconds=1.0, expected_s=1.5, obstacle="rows"),
        Prefilled(seconds=2.0, saved_s=3.0),
        Decoded(seconds=4.0, stalled_s=0.75),
        Queued(seconds=0.25, preempted_by="growth"),
        Decoded(seconds=1.0),
    )
    facts = {
        "index": 0,
        "phases": phases,
        "seconds": 8.75,
        "first_token_s": 3.5,
        "last_token_s": 8.5,
        "num_prompt_tokens": 100,
        "num_cached": 60,
        "num_skipped": 10,
        "num_tokens": 11,
        "finish_reason": "stop",
        "num_preemptions": 1,
        "spent_s": 0.25,
    }
    return RowTimeline(**(facts | changes))


def values_of(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def test_a_finished_choice_adds_one_value_to_each_histogram():
    figures = RequestFigures()
    figures.ended(row(), timeline())
    expected = {
        "first_token_s": 3.75,
        "per_token_s": 0.5,
        "total_s": 9.0,
        "queue_s": 1.25,
        "prefill_s": 2.0,
        "decode_s": 5.0,
        "inference_s": 7.0,
        "compile_s": 0.5,
        "stalled_s": 0.75,
        "prompt_tokens": 100,
        "output_tokens": 11,
        "max_output_tokens": 50,
        "computed_tokens": 30,
        "choices": 2,
        "preemptions": 1,
    }
    assert {name: values_of(getattr(figures, name)) for name in expected} == {
        name: (1, pytest.approx(value)) for name, value in expected.items()
    }
    assert (figures.finished, figures.preempted, figures.obstacles) == ({"stop": 1}, {"growth": 1}, {"rows": 1})
    assert (figures.saved_s, figures.waited_s, figures.expected_s) == (3.0, 1.0, 1.5)


def test_choices_are_counted_with_the_first_one():
    figures = RequestFigures()
    for index in range(2):
        figures.ended(row(index=index), timeline(index=index))
    assert values_of(figures.choices) == (1, 2)
    assert values_of(figures.total_s)[0] == 2


@pytest.mark.parametrize("reason", ["abort", "error", "expired"])
def test_an_answer_that_is_not_complete_has_no_times(reason: str):
    figures = RequestFigures()
    figures.ended(row(), timeline(finish_reason=reason, first_token_s=None, last_token_s=None))
    assert figures.finished == {reason: 1}
    assert all(
        sum(one.counts) == 0
        for name, one in vars(figures).items()
        if isinstance(one, Histogram) and name != "compile_s"
    )


def test_one_token_has_no_time_per_token():
    figures = RequestFigures()
    figures.ended(row(), timeline(num_tokens=1))
    assert (values_of(figures.first_token_s)[0], values_of(figures.per_token_s)[0]) == (1, 0)


def test_a_snapshot_no_longer_changes():
    figures = RequestFigures()
    figures.prompt_done(row())
    figures.ended(row(), timeline())
    before = figures.snapshot()
    figures.prompt_done(row())
    figures.ended(row(), timeline(finish_reason="length"))
    assert (before.num_prompts, before.num_prompt_tokens, before.num_cached_tokens) == (1, 100, 60)
    assert (before.finished, values_of(before.total_s)) == ({"stop": 1}, (1, 9.0))
