"""The lines of a phase of a start."""

import logging
import time

import pytest

from engine.start_phase import StartPhase

WAIT_S = 60.0


def test_a_phase_says_when_it_begins_how_far_it_is_and_how_long_it_took(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "orchard.engine")
    deadline = time.monotonic() + WAIT_S
    with StartPhase("reading weights", period_s=0.01) as phase:
        phase.progress = 0.4
        while "reading weights: 40 %, 0 s so far" not in caplog.messages:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
    assert caplog.messages[0] == "reading weights ..."
    assert caplog.messages[-1].startswith("reading weights took ") and caplog.messages[-1].endswith(" s")


def test_a_short_phase_has_two_lines_and_a_failed_one_names_the_error(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "orchard.engine")
    with pytest.raises(ZeroDivisionError), StartPhase("compiling"):
        raise ZeroDivisionError
    begin, end = caplog.messages
    assert begin == "compiling ..." and end.startswith("compiling failed with ZeroDivisionError after ")
