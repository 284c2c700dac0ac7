"""The number of drafts in synthetic time, against the best one."""

import logging
import random
from statistics import mean

import pytest

from engine.config import DraftMode, MTPConfig, PromptLookupConfig
from engine.core.cost_model import CostModel
from engine.core.runner import Drafts, RowOutput
from engine.core.speculation import SpeculationController
from tests.engine.core.simulation import (
    BUSY_CPU,
    CPU,
    GPU,
    MTP,
    HeadsSimulation,
    LookupSimulation,
    Seconds,
    Simulation,
    best_rate,
    expected_tokens,
    never_pays,
    pays_for_two_rows,
    verifies_row_by_row,
)
from tests.support.night import some_at_night

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


PROFILES: dict[str, tuple[Seconds, Acceptances]] = {
    "demo": (CPU, (0.98, 0.98, 0.97)),
    "demo, busy": (BUSY_CPU, (0.98, 0.97, 0.97)),
    "demo, sampled": (BUSY_CPU, (0.8, 0.8, 0.8)),
    "gpu": (GPU, (0.8, 0.7, 0.6)),
    "gpu, random head": (GPU, (0.01, 0.01, 0.01)),
    "never pays": (never_pays, (0.7, 0.6, 0.5)),
    "pays for two rows": (pays_for_two_rows, (0.8, 0.7, 0.6)),
    "verifies row by row": (verifies_row_by_row, (0.8, 0.7, 0.6)),
}
NOISE, SPIKES = 0.2, 0.02


@pytest.mark.parametrize("num_rows", some_at_night([1, 4, 8, 16], [1, 16], "the gate has the fewest and the most rows"))
@pytest.mark.parametrize("profile", PROFILES)
def test_a_fresh_server_is_fast_from_its_first_answer_on(profile, num_rows):
    """120 tokens of each row; a head that guesses nothing is found out on the way."""
    seconds, acceptance = PROFILES[profile]
    rates = [Simulation(seconds, acceptance, NOISE, SPIKES, seed).run(120, num_rows) for seed in range(10)]
    assert mean(rates) >= 0.9 * best_rate(seconds, acceptance, num_rows)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("profile", PROFILES)
def test_auto_stays_near_the_best_draft_length_and_is_never_slower_than_plain_decoding(profile, num_rows):
    seconds, acceptance = PROFILES[profile]
    simulations = [Simulation(seconds, acceptance, NOISE, SPIKES, seed) for seed in range(3)]
    for simulation in simulations:
        simulation.run(300, num_rows)
    rate = mean(simulation.run(1500, num_rows) for simulation in simulations)
    assert rate >= 0.95 * best_rate(seconds, acceptance, num_rows)
    assert rate >= 0.97 / seconds(num_rows, 0)


@pytest.mark.parametrize("profile", PROFILES)
def test_bursts_are_fast_from_their_first_second_on(profile):
    """Rows come one by one while others decode, and leave one by one, in a fresh server."""
    seconds, acceptance = PROFILES[profile]
    best_s = elapsed_s = 0.0
    for seed in range(6):
        simulation = Simulation(seconds, acceptance, NOISE, SPIKES, seed)
        for num_rows in [*range(1, 17), *[16] * 8, *range(16, 0, -1)]:
            began_s = simulation.elapsed_s
            num_tokens = simulation.run(8, num_rows) * (simulation.elapsed_s - began_s)
            best_s += num_tokens / best_rate(seconds, acceptance, num_rows)
        elapsed_s += simulation.elapsed_s
    assert best_s / elapsed_s >= 0.9


@pytest.mark.parametrize("seeded", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("noise", some_at_night([0.0, 0.1], [0.1], "noise makes it harder"))
@pytest.mark.parametrize("world", WORLDS)
def test_auto_is_nearly_as_fast_as_the_best_k_and_never_slower_than_plain_decoding(world, noise, seeded):
    seconds, acceptance = WORLDS[world]
    plain, best = 1 / seconds(1, 0), best_rate(seconds, acceptance)
    for seed in range(2):
        simulation = Simulation(seconds, acceptance, noise, spikes=0.02 if noise else 0.0, seed=seed, seeded=seeded)
        simulation.run(1000)
        assert simulation.run(2000) >= max(0.97 * plain, 0.85 * best)
        assert simulation.controller.num_switches <= len(simulation.drafts) / 50


@pytest.mark.parametrize(
    "draft_cost", some_at_night([0.5, 1.5, 4.0], [4.0], "a trial of the dearest drafts costs the most")
)
def test_trials_cost_less_than_three_percent_when_plain_is_best(draft_cost):
    simulation = Simulation(lambda rows, k: STEP_S * (1 + draft_cost * k), (0.3, 0.2, 0.1), noise=0.05)
    simulation.run(2000)
    rate = simulation.run(20_000)
    assert rate * STEP_S > 0.98


def test_auto_learns_when_drafts_begin_to_pay_and_when_they_cease_to():
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
def test_alternating_tasks_are_no_slower_than_plain_decoding(every):
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.3 * k), (0, 0, 0), noise=0.05)
    for i in range(12_000 // every):
        simulation.acceptance = (0.9, 0.85, 0.8) if i % 2 else (0.15, 0.1, 0.1)
        simulation.run(every)
    assert 12_000 / simulation.elapsed_s > 0.98 / STEP_S
    assert simulation.controller.num_switches < len(simulation.drafts) / 100


def test_changing_batch_sizes_decode_nearly_as_fast_as_with_the_best_k_of_each():
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
    assert simulation.elapsed_s < plain_s and simulation.elapsed_s < best_s / 0.95


def test_steps_that_slow_down_equally_for_all_k_cause_few_switches_of_k():
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


def controller_of(mode: DraftMode, num_draft_tokens: int = 3, no_drafts: str = "") -> SpeculationController:
    """Return the controller of a runner with an MTP head that drafts up to `num_draft_tokens` tokens."""
    return SpeculationController({"mtp": mode}, CostModel(MTP[:num_draft_tokens]), {"mtp": no_drafts})


def outputs(k: int, *num_accepted: int) -> list[RowOutput]:
    return [RowOutput((7,) * (n + 1), (), k, n) for n in num_accepted]


def test_acceptance_by_depth_follows_from_how_many_were_accepted():
    controller = controller_of(MTPConfig(max_draft_tokens=3, max_rows=8), 3)
    for _ in range(10):
        controller.record(outputs(3, 0, 1, 3, 3))
    status = controller.status()["mtp"]
    assert status["acceptance"] == round(7 / 12, 4)
    assert status["acceptance_by_depth"] == pytest.approx([3 / 4, 2 / 3, 1.0], abs=0.02)
    assert (status["num_rounds"], status["num_drafted"], status["num_accepted"]) == (10, 120, 70)


def test_a_row_that_cannot_draft_counts_as_one_whose_drafts_fail():
    controller = controller_of("auto", 3)
    for _ in range(20):
        controller.record([RowOutput((7, 7, 7), (), 2, 2), RowOutput((7,))])
    first, second, unknown = controller.status()["mtp"]["acceptance_by_depth"]
    assert (first, second) == pytest.approx((0.5, 1.0), abs=0.03) and unknown is None


def test_acceptance_is_an_average_over_many_rows_and_a_change_of_text_is_noticed():
    controller = controller_of(MTPConfig(max_draft_tokens=1), 1)
    rng = random.Random(1)
    for _ in range(500):
        controller.record(outputs(1, rng.random() < 0.7))
    assert controller.status()["mtp"]["acceptance_by_depth"] == pytest.approx([0.7], abs=0.15)
    for _ in range(20):
        controller.record(outputs(1, 0))
    assert controller.status()["mtp"]["acceptance_by_depth"][0] < 0.3


def test_a_fixed_number_is_drafted_while_there_are_few_rows():
    controller = controller_of(MTPConfig(max_draft_tokens=2, max_rows=4), 3)
    assert [controller.choose(rows).num_tokens for rows in (0, 1, 4, 5, 40)] == [0, 2, 2, 0, 0]
    assert controller_of(MTPConfig(max_draft_tokens=8), 3).choose(1).num_tokens == 3, "no more than the runner can"
    assert controller.status()["mtp"]["mode"] == "fixed"


def test_speculation_that_is_off_drafts_no_tokens_and_reports_the_reason():
    no_head = "no MTP head in the checkpoint"
    for controller, reason in (
        (controller_of("off", 3, no_head), "off in the configuration"),
        (controller_of("auto", 0, no_head), no_head),
        (controller_of(MTPConfig(), 0, no_head), no_head),
    ):
        for _ in range(100):
            assert controller.choose(1).num_tokens == 0
            controller.record([RowOutput((7,))])
        status = controller.status()["mtp"]
        assert (status["mode"], status["reason"], status["acceptance"]) == ("off", reason, None)
        assert controller.status()["step_ms"] == {}


def test_the_watchdog_pauses_a_head_without_accepted_drafts_for_doubling_intervals(caplog):
    caplog.set_level(logging.WARNING, "orchard.engine")
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.05 * k), (0.02, 0.02, 0.02))
    simulation.run(40_000)
    controller = simulation.controller
    assert controller.status()["mtp"]["num_watchdog_trips"] >= 2
    first, second = caplog.messages[:2]
    assert "draft tokens were accepted in 64 rounds, fewer than 20 %; the next check is in 1024 rounds" in first
    assert second.endswith("in 2048 rounds")
    assert sum(k > 0 for k in simulation.drafts) < 0.04 * len(simulation.drafts)


def test_no_tokens_are_drafted_during_a_watchdog_pause_and_drafting_resumes_after_it():
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.05 * k), (0.0, 0.0, 0.0))
    while not simulation.controller.status()["mtp"]["num_watchdog_trips"]:
        simulation.run(1)
    assert "few drafts were accepted" in simulation.controller.status()["mtp"]["reason"]
    began = len(simulation.drafts)
    simulation.run(1000)
    assert not any(simulation.drafts[began:])
    simulation.acceptance = (0.9, 0.9, 0.9)
    simulation.run(400)
    assert simulation.run(200) > 0.9 * best_rate(simulation.seconds, simulation.acceptance)
    assert simulation.controller.status()["mtp"]["num_watchdog_trips"] == 1


def test_a_request_whose_drafts_fail_does_not_end_drafting_for_later_requests():
    simulation = Simulation(lambda rows, k: STEP_S * (1 + 0.2 * k), (0.9, 0.85, 0.8))
    simulation.run(500)
    simulation.acceptance = (0.02, 0.02, 0.02)
    simulation.run(300)
    simulation.acceptance = (0.9, 0.85, 0.8)
    simulation.run(1500)
    assert simulation.run(500) > 0.9 * best_rate(simulation.seconds, simulation.acceptance)


def test_a_fixed_number_of_drafts_continues_despite_a_watchdog_warning(caplog):
    caplog.set_level(logging.WARNING, "orchard.engine")
    controller = controller_of(MTPConfig(max_draft_tokens=2), 3)
    for _ in range(200):
        assert controller.choose(1).num_tokens == 2
        controller.record(outputs(2, 0))
    assert controller.status()["mtp"]["num_watchdog_trips"] == 1 and len(caplog.messages) == 1


def test_the_expected_tokens_per_step_follow_the_formula_of_the_paper():
    assert expected_tokens((0.5, 0.5, 0.5), 3) == 1.875


def memory_bound(num_rows: int, num_drafts: int) -> float:
    return STEP_S * (1 + 0.02 * num_rows + 0.02 * num_drafts * num_rows)


def compute_bound(num_rows: int, num_drafts: int) -> float:
    return STEP_S * (1 + 0.3 * num_rows + 0.5 * num_drafts * num_rows)


@pytest.mark.parametrize("num_rows", some_at_night([1, 4, 8], [1, 8], "the gate has the fewest and the most rows"))
@pytest.mark.parametrize("copied", [0, 5, 30, 300])
def test_prompt_lookup_costs_at_most_three_percent_where_it_does_not_pay(num_rows, copied):
    """Verification is as dear as decoding, and half of the drafts are wrong."""
    simulation = LookupSimulation(compute_bound, copied=copied, period=400, accepted=0.5)
    simulation.run(400, num_rows)
    assert simulation.run(3000, num_rows) >= 0.97 / compute_bound(num_rows, 0)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_prompt_lookup_that_is_accepted_is_used_from_its_first_matches_on(num_rows):
    simulation = LookupSimulation(memory_bound, copied=200, period=400)
    most = sum(0.95**k for k in range(9)) / memory_bound(num_rows, 8)
    plain = 1 / memory_bound(num_rows, 0)
    assert simulation.run(800, num_rows) >= 0.8 * 2 / (1 / most + 1 / plain)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_a_head_keeps_drafting_where_nothing_matches_and_prompt_lookup_adds_to_it(num_rows):
    with_head = LookupSimulation(memory_bound, copied=0, period=400, head=True)
    with_head.run(400, num_rows)
    head_alone = best_rate(memory_bound, with_head.acceptance, num_rows)
    assert with_head.run(3000, num_rows) >= 0.97 * head_alone
    both = LookupSimulation(memory_bound, copied=200, period=400, head=True)
    both.run(400, num_rows)
    assert both.run(3000, num_rows) >= (1.1 if num_rows == 1 else 1.0) * head_alone


def test_rejected_drafts_of_prompt_lookup_do_not_pause_the_head():
    simulation = LookupSimulation(memory_bound, copied=400, period=400, accepted=0.02, head=True)
    simulation.run(3000)
    status = simulation.controller.status()
    assert status["mtp"]["num_watchdog_trips"] == 0
    assert simulation.run(1000) >= 0.95 * best_rate(memory_bound, simulation.acceptance)


def test_fixed_prompt_lookup_precedes_a_fixed_head_where_rows_have_matches():
    costs = CostModel([*MTP, *(Drafts(k, "prompt_lookup", is_selective=True) for k in (4, 8))])
    modes: dict[str, DraftMode] = {
        "mtp": MTPConfig(max_draft_tokens=2, max_rows=2),
        "prompt_lookup": PromptLookupConfig(max_draft_tokens=4),
    }
    controller = SpeculationController(modes, costs, {})
    assert controller.choose(1) == Drafts(2)
    controller.record([RowOutput((7,), can_draft=frozenset(["prompt_lookup"])), RowOutput((7,))])
    assert controller.choose(2) == Drafts(4, "prompt_lookup")
    assert controller.choose(5) == Drafts()
    controller.record([RowOutput((7,)), RowOutput((7,))])
    assert controller.choose(2) == Drafts(2)


def dear(num_rows: int, num_drafts: int) -> float:
    """Steps of a head of many layers."""
    return memory_bound(num_rows, num_drafts) + num_drafts * memory_bound(num_rows, 0) * 0.6


GOOD, BAD = (0.85, 0.8, 0.75), (0.4, 0.3, 0.2)


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize(
    ("heads", "best"),
    [
        ({"mtp": (memory_bound, GOOD), "eagle3": (memory_bound, BAD)}, "mtp"),
        ({"mtp": (memory_bound, BAD), "eagle3": (memory_bound, GOOD)}, "eagle3"),
        ({"mtp": (memory_bound, GOOD), "eagle3": (dear, (0.9, 0.85, 0.8)), "dflash": (dear, BAD)}, "mtp"),
    ],
)
def test_the_head_whose_drafts_are_fastest_is_used_of_several(heads, best, num_rows):
    simulation = HeadsSimulation(heads, noise=0.05)
    simulation.run(400, num_rows)
    simulation.used.clear()
    seconds, acceptance = heads[best]
    assert simulation.run(2000, num_rows) >= 0.95 * best_rate(seconds, acceptance, num_rows)
    drafted = [one.proposer for one in simulation.used if one.num_tokens]
    assert drafted.count(best) > 0.9 * len(drafted)


def test_another_head_is_used_when_the_text_changes():
    simulation = HeadsSimulation({"mtp": (memory_bound, GOOD), "eagle3": (memory_bound, BAD)}, noise=0.05)
    simulation.run(1500)
    simulation.heads = {"mtp": (memory_bound, BAD), "eagle3": (memory_bound, GOOD)}
    simulation.run(3000)
    assert simulation.run(2000) >= 0.95 * best_rate(memory_bound, GOOD)
