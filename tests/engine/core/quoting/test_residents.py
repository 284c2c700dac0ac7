"""Residents: sums that are kept up to date step by step equal those of all residents."""

import random

import pytest

from engine.core.quoting.residents import GROWTH, MAX_RESIDENTS, RESIDENT_S, Residents
from engine.placement import ConversationKeys
from tests.support.clock import Clock


def keys(number: int, system: int = 0) -> ConversationKeys:
    return ConversationKeys(system, number, (number,))


def test_sums_equal_those_of_all_residents_after_random_arrivals_answers_and_ends():
    clock, rng = Clock(), random.Random(0)
    residents = Residents(clock)
    lengths: dict[int, tuple[float, int, float]] = {}  # conversation -> tokens, number of the system part, last seen
    living = lengths
    for _ in range(3000):
        clock.now_s += 3 * rng.random()
        number = rng.randrange(400)
        system, num_tokens = number % 7, 500 + rng.randrange(5000)
        if number in residents and rng.random() < 0.5:
            residents.answered(keys(number, system), num_tokens)
        else:
            residents.arrived(keys(number, system), num_tokens, 20 + 10 * system)
        lengths[number] = num_tokens, system, clock.now_s
        living = {n: one for n, one in lengths.items() if one[2] >= clock.now_s - RESIDENT_S}
        assert residents.figures.num_residents == len(living)
    shared = sum(20 + 10 * system for system in {one[1] for one in living.values()})
    own = sum(one[0] - 20 - 10 * one[1] for one in living.values())
    for found, growth in zip(residents.figures.num_tokens, GROWTH, strict=True):
        assert own + shared < found < 3 * growth * (own + shared), "at least what they have now"
    clock.now_s += RESIDENT_S + 1
    residents.arrived(keys(9999), 1000, 0)
    assert residents.figures.num_residents == 1
    assert residents.figures.num_tokens == pytest.approx(residents.reach(1000))


def test_the_number_of_residents_is_bounded():
    residents = Residents(Clock())
    for number in range(MAX_RESIDENTS + 10):
        residents.arrived(keys(number), 1000, 0)
    assert residents.figures.num_residents == MAX_RESIDENTS
    assert 0 not in residents and MAX_RESIDENTS + 9 in residents


def test_a_system_part_counts_once_until_its_last_conversation_has_ended():
    clock = Clock()
    residents = Residents(clock)
    for number in range(3):
        residents.arrived(keys(number, system=1), 1000, 800)
    expected = [800 + 3 * (growth * 1000 - 800) for growth in GROWTH]
    assert residents.figures.num_tokens == pytest.approx(expected)
    clock.now_s += RESIDENT_S + 1
    residents.arrived(keys(7, system=2), 1000, 0)
    assert residents.figures.num_tokens == pytest.approx(residents.reach(1000))
