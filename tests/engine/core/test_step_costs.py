"""StepCosts against machines whose steps are known."""

import random

import numpy as np
import pytest

from engine.core.runner import Drafts, StepTime
from engine.core.step_costs import StepCosts
from tests.engine.core.simulation import CPU, measured

MTP = tuple(Drafts(k) for k in (1, 2, 3))
WARM_UP = [StepTime(num_rows, Drafts(k), CPU(num_rows, k)) for num_rows in (1, 2, 8) for k in range(4)]


def ratios(costs: StepCosts, num_rows: int) -> np.ndarray:
    seconds = costs.seconds(num_rows)
    return seconds / seconds[0]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8, 12, 16])
def test_warm_up_with_few_rows_predicts_more_rows(num_rows: int):
    true = [CPU(num_rows, k) for k in range(4)]
    assert StepCosts(MTP, WARM_UP).seconds(num_rows) == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_drafts_of_a_block_are_predicted_to_cost_one_forward_of_the_head_however_many_there_are(num_rows: int):
    def seconds(num_rows: int, k: int) -> float:
        return 0.02 + 0.001 * num_rows + (0.005 + 0.0005 * num_rows if k else 0.0) + 0.0002 * num_rows * k

    block = tuple(Drafts(k) for k in (1, 3, 7, 15))
    warm_up = [StepTime(n, Drafts(k), seconds(n, k)) for n in (1, 2, 8) for k in (0, 1, 3, 7, 15)]
    true = [seconds(num_rows, one.num_tokens) for one in (Drafts(0), *block)]
    assert StepCosts(block, warm_up).seconds(num_rows) == pytest.approx(true, rel=0.02)


def test_an_outlying_step_time_changes_no_cost_and_a_slower_machine_is_soon_learned():
    costs = StepCosts(MTP, WARM_UP)
    before = costs.seconds(4)
    costs.record(4, Drafts(3), 10 * CPU(4, 3))
    assert costs.seconds(4) == pytest.approx(before, rel=0.01)
    for _ in range(30):
        costs.record(4, Drafts(3), CPU(4, 3))
    before = ratios(costs, 4)
    for _ in range(30):
        costs.record(4, Drafts(3), 2 * CPU(4, 3))
    assert costs.seconds(4)[3] == pytest.approx(2 * CPU(4, 3), rel=0.1)
    assert ratios(costs, 4) == pytest.approx(before, rel=0.2), "all steps have become slower"


@pytest.mark.parametrize("seed", range(100))
def test_predictions_stay_among_the_steps_of_a_warm_up_that_other_work_disturbed(seed: int):
    """A plain step that is predicted to take no time would end the start, or all drafting."""
    rng = random.Random(seed)
    steps = [StepTime(n, Drafts(k), CPU(n, k) * rng.lognormvariate(0, 1.5)) for n in (1, 2, 4) for k in range(4)]
    costs = StepCosts(MTP, steps)
    for num_rows in (1, 2, 4):
        seconds = costs.seconds(num_rows)
        assert min(s.seconds for s in steps) / 4 < seconds.min() < seconds.max() < 4 * max(s.seconds for s in steps)


def test_a_measured_batch_size_informs_its_neighbouring_sizes_most():
    slow = measured({1: (10, 30), 32: (10, 30)})
    costs, rng = StepCosts(MTP[:1], [StepTime(1, Drafts(k), 0.01) for k in (0, 1)]), random.Random(1)
    for i in range(40):
        costs.record(4, Drafts(i % 2), slow(4, i % 2) * rng.lognormvariate(0, 0.1))
    assert ratios(costs, 4)[1] == pytest.approx(3.0, rel=0.15)
    assert ratios(costs, 4)[1] > ratios(costs, 8)[1] > ratios(costs, 64)[1] > 1.2
    assert ratios(costs, 1)[1] < 1.6, "which was measured itself"


def test_the_uncertainty_grows_while_a_number_of_drafts_is_not_used_and_falls_when_it_is():
    costs = StepCosts(MTP, WARM_UP)
    for _ in range(100):
        costs.record(1, Drafts(3), CPU(1, 3))
    early = costs.ratio_std(1, 3)
    for _ in range(2000):
        costs.record(1, Drafts(3), CPU(1, 3))
    late = costs.ratio_std(1, 3)
    assert late[0] > 1.5 * early[0] and late[3] == 0.0
    for _ in range(4):
        costs.record(1, Drafts(0), CPU(1, 0))
    assert costs.ratio_std(1, 3)[0] < 0.5 * late[0]


def test_steps_of_zero_seconds_give_finite_costs():
    costs = StepCosts(MTP)
    for k in (0, 3) * 10:
        costs.record(500, Drafts(k), 0.0)
    assert np.isfinite(costs.seconds(500)).all() and np.isfinite(costs.ratio_std(1, 0)).all()
