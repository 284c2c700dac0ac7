"""How soon and how likely a snapshot is used again, as it is learned."""

import pytest

from engine.core.prefix_cache.node import Lineage
from engine.core.prefix_cache.reuse_forecast import FIRST_INTERVAL_S, ReuseForecast, odds_key

NEW = ("turn", "leaf", 0)


def test_a_lineage_without_history_has_the_mean_interval_of_the_others():
    forecast, talk, new = ReuseForecast(), Lineage(), Lineage(used_s=100, seen_s=100)
    assert forecast.rate(new, NEW, 100) == pytest.approx(0.5 / FIRST_INTERVAL_S)
    for now in range(10, 110, 10):
        forecast.returned(talk, now)
    assert talk.interval_s == pytest.approx(10)
    assert forecast.rate(new, NEW, 100) == pytest.approx(0.5 / 10)


def test_a_long_pause_does_not_change_the_forecast_of_a_quick_conversation():
    forecast, talk = ReuseForecast(), Lineage()
    for now in (10, 20, 30, 30 + 36_000, 30 + 36_010):
        forecast.returned(talk, now)
    assert talk.interval_s is not None and talk.interval_s < 60


def test_the_rate_falls_while_a_lineage_is_overdue_and_the_probability_after_a_long_pause():
    forecast, talk = ReuseForecast(), Lineage()
    forecast.returned(talk, 10)
    key = odds_key("turn", "leaf", talk)
    rates = [forecast.rate(talk, key, now) for now in (11, 20, 30, 110)]
    assert rates == pytest.approx([0.08, 0.08, 0.04, 0.008])
    assert [forecast.probability(talk, key, now) for now in (11, 610, 6010)] == pytest.approx([0.8, 0.8, 0.08])


def test_the_reuse_probability_follows_recent_outcomes_of_each_kind():
    forecast, lineage = ReuseForecast(), Lineage()
    for _ in range(100):
        forecast.unused(NEW)
    rare = forecast.probability(lineage, NEW, 0)
    assert rare < 0.02
    forecast.undo_unused(NEW)
    forecast.used(NEW)
    assert forecast.probability(lineage, NEW, 0) > rare
    for _ in range(200):
        forecast.used(NEW)
    assert forecast.probability(lineage, NEW, 0) > 0.9, "it is not what happened long ago that counts"
    assert forecast.probability(lineage, ("prompt", "leaf", 0), 0) == 0.5, "each kind has its own"
