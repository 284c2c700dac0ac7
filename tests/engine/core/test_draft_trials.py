"""The pauses between trials of other ways to draft."""

from engine.core.speculation import TRIAL_PAUSE, Trials


def steps_until_due(trials: Trials) -> int:
    for step in range(10 * TRIAL_PAUSE):
        if trials.is_due:
            return step
        trials.record(1.0, 0.0)
    raise AssertionError("no trial is ever due")


def test_pause_follows_a_trial_that_has_ended():
    trials = Trials()
    trials.begin(1, 0.0)
    trials.record(1.0, 0.0)
    trials.end()
    assert trials.choice is None and steps_until_due(trials) == TRIAL_PAUSE - 1


def test_cancelling_does_not_put_off_the_next_trial():
    """A proposer whose matches come and go cancels every few steps."""
    trials = Trials()
    trials.end()
    num_steps = 0
    while not trials.is_due:
        trials.cancel()
        trials.record(1.0, 0.0)
        num_steps += 1
        assert num_steps < TRIAL_PAUSE
