"""How many drafts: in synthetic time, against what would have been best."""

import logging
from statistics import mean

import pytest

from engine.config import MTPConfig
from engine.core.batch import RowOutput
from engine.core.speculation import SpeculationController
from tests.engine.core.simulation import Seconds, Simulation, best_rate, expected_tokens

STEP_S = 0.01

Acceptances = tuple[float, ...]

WORLDS: dict[str, tuple[Seconds, Acceptances]] = {
    "a head that guesses nothing": (lambda rows, k: STEP_S * (1 + 0.5 * k), (0.05, 0.05, 0.05)),
    "not worth it": (lambda rows, k: STEP_S * (1 + 0.4 * k), (0.3, 0.3, 0.3)),
    "just as fast": (lambda rows, k: STEP_S * (1 + 0.4 * k), (0.4, 0.4, 0.4)),
    "one draft pays": (lambda rows, k: STEP_S * (1 + 0.4 * k), (0.7, 0.3, 0.1)),
    "three drafts pay": (lambda rows, k: STEP_S * (1 + 0.15 * k), (0.9, 0.85, 0.8)),
    "only many drafts pay": (lambda rows, k: STEP_S * (1.5 + 0.02 * k if k else 1), (0.5, 0.5, 0.5)),
    "few hold, but they cost nothing": (lambda rows, k: STEP_S * (1 + 0.03 * k), (0.35, 0.35, 0.35)),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "orchard.engine")


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("world", WORLDS)
def test_auto_is_as_fast_as_the_best_k_and_never_slower_than_none(world, noise, num_rows):
    seconds, acceptance = WORLDS[world]
    plain = 1 / seconds(num_rows, 0)
    best = best_rate(seconds, acceptance, num_rows)
    for seed in range(2):
        simulation = Simulation(seconds, acceptance, noise, spikes=0.02 if noise else 0.0, seed=seed)
        assert simulation.run(1000, num_rows) >= 0.97 * plain
        assert simulation.run(2000, num_rows) >= max(0.98 * plain, 0.85 * best)
        assert simulation.controller.num_switches <= len(simulation.drafts) / 150


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("world", WORLDS)
def test_the_first_answer_of_sixty_tokens_costs_little_also_where_drafts_are_useless(world, num_rows):
    """It pays for the first trial, once in a process and range of batch sizes: that is with most drafts at once."""
    seconds, acceptance = WORLDS[world]
    plain = 1 / seconds(num_rows, 0)
    rates = [Simulation(seconds, acceptance, seed=seed).run(60, num_rows) for seed in range(20)]
    assert mean(rates) >= 0.95 * plain and min(rates) >= 0.93 * plain


def test_the_first_answer_is_faster_already_where_drafts_pay_well():
    seconds, acceptance = WORLDS["three drafts pay"]
    rates = [Simulation(seconds, acceptance, seed=seed).run(60) for seed in range(10)]
    assert mean(rates) > 1.4 / STEP_S


@pytest.mark.parametrize("draft_cost", [0.5, 1.5, 4.0])
def test_probing_stays_under_one_percent_when_plain_is_best(draft_cost):
    simulation = Simulation(lambda rows, k: STEP_S * (1 + draft_cost * k), (0.3, 0.2, 0.1), noise=0.05)
    simulation.run(2000)
    began_s, began = simulation.elapsed_s, len(simulation.drafts)
    rate = simulation.run(20_000)
    drafted = [k for k in simulation.drafts[began:] if k]
    assert rate * STEP_S > 0.99 and len(drafted) < 0.01 * len(simulation.drafts)
    assert drafted, "but it looks again now and then"
    assert simulation.elapsed_s > began_s


def test_it_finds_out_when_drafts_begin_to_pay_and_when_they_cease_to():
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.2 * k), (0.1, 0.1, 0.1), noise=0.05)
    simulation.run(1500)
    assert simulation.controller.status()["num_draft_tokens"] == 0
    simulation.acceptance = (0.9, 0.85, 0.8)
    simulation.run(6000)
    best = best_rate(simulation.seconds, simulation.acceptance)
    assert simulation.run(1000) > 0.95 * best
    simulation.acceptance = (0.1, 0.1, 0.1)
    simulation.run(150)
    assert simulation.run(1000) > 0.97 / STEP_S


@pytest.mark.parametrize("every", [60, 1000])
def test_tasks_that_alternate_cost_nothing_against_plain(every):
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.3 * k), (0, 0, 0), noise=0.05)
    for i in range(12_000 // every):
        simulation.acceptance = (0.9, 0.85, 0.8) if i % 2 else (0.15, 0.1, 0.1)
        simulation.run(every)
    assert 12_000 / simulation.elapsed_s > 0.98 / STEP_S
    assert simulation.controller.num_switches < len(simulation.drafts) / 200


def test_batches_that_grow_and_shrink_get_each_its_own_k():
    def seconds(rows: int, k: int) -> float:
        return STEP_S * (1 + 0.02 * rows + 0.1 * k + 0.04 * k * rows)

    acceptance = (0.8, 0.7, 0.6)
    simulation = Simulation(seconds, acceptance, noise=0.1)
    plain_s = best_s = 0.0
    sizes = [1, 2, 4, 8, 20, 24, 12, 6, 3, 1] * 20
    for num_rows in sizes:
        simulation.run(40, num_rows)
        plain_s += 40 * seconds(num_rows, 0)
        best_s += 40 / best_rate(seconds, acceptance, num_rows)
    assert simulation.elapsed_s < plain_s and simulation.elapsed_s < best_s / 0.92
    assert simulation.controller.num_switches < 40


def test_steps_that_become_slower_for_all_k_alike_change_nothing():
    factor = 1.0
    simulation = Simulation(lambda rows, k: factor * STEP_S * (1 + 0.25 * k), (0.8, 0.7, 0.6), noise=0.05)
    simulation.run(300)
    plain_s = 0.0
    for _request in range(5):
        for part in range(20):  # the context grows to three times the price, then the next request begins
            factor = 1 + part / 10
            simulation.run(50)
            plain_s += 50 * factor * STEP_S
    speedup = plain_s / (simulation.elapsed_s - 300 * STEP_S)
    assert speedup > 0.9 * best_rate(lambda rows, k: 1 + 0.25 * k, simulation.acceptance)
    assert simulation.controller.num_switches < 25


def test_first_steps_after_a_change_of_rows_are_not_measured():
    controller = SpeculationController("auto", 3)
    for i in range(40):
        controller.num_draft_tokens(1 + i % 2)
        controller.record(0, 1 + i % 2, STEP_S, [RowOutput((7,))])
    assert controller.status()["step_ms"] == {}
    for seconds in (9.0, 0.01, 0.01):
        controller.record(0, 3, seconds, [RowOutput((7,))] * 3)
    assert controller.status()["step_ms"] == {"3-4": {"0": 10.0}}
    controller.record(0, 3, None, [RowOutput((7,))] * 3)
    assert controller.status()["step_ms"] == {"3-4": {"0": 10.0}}


def test_without_times_nothing_is_tried():
    controller = SpeculationController("auto", 3)
    for _ in range(2000):
        assert controller.num_draft_tokens(4) == 0
        controller.record(0, 4, None, [RowOutput((7,))] * 4)


def outputs(k: int, *num_accepted: int) -> list[RowOutput]:
    return [RowOutput((7,) * (n + 1), (), k, n) for n in num_accepted]


def test_acceptance_by_depth_follows_from_how_many_were_accepted():
    controller = SpeculationController(MTPConfig(max_draft_tokens=3, max_rows=8), 3)
    for _ in range(10):
        controller.record(3, 4, None, outputs(3, 0, 1, 3, 3))
    status = controller.status()
    assert status["acceptance"] == round(7 / 12, 4)
    assert status["acceptance_by_depth"] == pytest.approx([3 / 4, 2 / 3, 1.0], abs=0.02)
    assert (status["num_rounds"], status["num_drafted"], status["num_accepted"]) == (10, 120, 70)


def test_a_row_that_cannot_draft_counts_as_one_whose_drafts_fail():
    controller = SpeculationController("auto", 3)
    for _ in range(20):
        controller.record(2, 2, None, [RowOutput((7, 7, 7), (), 2, 2), RowOutput((7,))])
    first, second, unknown = controller.status()["acceptance_by_depth"]
    assert (first, second) == pytest.approx((0.5, 1.0), abs=0.03) and unknown is None


def test_acceptance_is_an_average_over_about_64_rows():
    controller = SpeculationController(MTPConfig(max_draft_tokens=1), 1)
    for _ in range(500):
        controller.record(1, 1, None, outputs(1, 1))
    for _ in range(64):
        controller.record(1, 1, None, outputs(1, 0))
    [acceptance] = controller.status()["acceptance_by_depth"]
    assert 0.3 < acceptance < 0.45, "1/e of what was before"


def test_a_fixed_number_is_drafted_while_there_are_few_rows():
    controller = SpeculationController(MTPConfig(max_draft_tokens=2, max_rows=4), 3)
    assert [controller.num_draft_tokens(rows) for rows in (0, 1, 4, 5, 40)] == [0, 2, 2, 0, 0]
    assert SpeculationController(MTPConfig(max_draft_tokens=8), 3).num_draft_tokens(1) == 3, (
        "no more than the runner can"
    )
    assert controller.status()["mode"] == "fixed"


def test_off_is_off_and_says_why():
    no_head = "no MTP head in the checkpoint"
    for controller, reason in (
        (SpeculationController("off", 3, no_head), "off in the configuration"),
        (SpeculationController("auto", 0, no_head), no_head),
        (SpeculationController(MTPConfig(), 0, no_head), no_head),
    ):
        for _ in range(100):
            assert controller.num_draft_tokens(1) == 0
            controller.record(0, 1, STEP_S, [RowOutput((7,))])
        status = controller.status()
        assert (status["mode"], status["reason"], status["acceptance"]) == ("off", reason, None)
        assert status["step_ms"] == {"1": {"0": 10.0}}


def test_the_watchdog_stops_a_head_that_guesses_nothing_and_looks_again_ever_later(caplog):
    caplog.set_level(logging.WARNING, "orchard.engine")
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.05 * k), (0.02, 0.02, 0.02))
    simulation.run(40_000)
    controller = simulation.controller
    assert controller.num_watchdog_trips >= 2
    first, second = caplog.messages[:2]
    assert "of 64 draft tokens were accepted in 64 rounds, fewer than 20 %; the next look is in 1024 rounds" in first
    assert second.endswith("in 2048 rounds")
    assert sum(k > 0 for k in simulation.drafts) < 0.04 * len(simulation.drafts)


def test_while_the_watchdog_pauses_nothing_is_drafted_and_then_it_may_pay_again():
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.05 * k), (0.0, 0.0, 0.0))
    while not simulation.controller.num_watchdog_trips:
        simulation.run(1)
    assert "hardly any draft was accepted" in simulation.controller.status()["reason"]
    began = len(simulation.drafts)
    simulation.run(1000)
    assert not any(simulation.drafts[began:])
    simulation.acceptance = (0.9, 0.9, 0.9)
    simulation.run(400)
    assert simulation.run(200) > 0.9 * best_rate(simulation.seconds, simulation.acceptance)
    assert simulation.controller.num_watchdog_trips == 1


def test_one_request_whose_drafts_fail_does_not_end_them_for_others():
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.2 * k), (0.9, 0.85, 0.8))
    simulation.run(500)
    simulation.acceptance = (0.02, 0.02, 0.02)
    simulation.run(300)
    simulation.acceptance = (0.9, 0.85, 0.8)
    simulation.run(1500)
    assert simulation.run(500) > 0.9 * best_rate(simulation.seconds, simulation.acceptance)


def test_a_fixed_number_goes_on_but_the_watchdog_warns(caplog):
    caplog.set_level(logging.WARNING, "orchard.engine")
    controller = SpeculationController(MTPConfig(max_draft_tokens=2), 3)
    for _ in range(200):
        assert controller.num_draft_tokens(1) == 2
        controller.record(2, 1, STEP_S, outputs(2, 0))
    assert controller.status()["num_watchdog_trips"] == 1 and len(caplog.messages) == 1


def test_the_expectation_is_the_one_of_the_paper():
    assert expected_tokens((0.5, 0.5, 0.5), 3) == 1.875
