"""The timeline of a row: its phases follow one another without gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.timeline_recorder import TimelineRecorder
from engine.timeline import MAX_PHASES, Compiling, Decoded, Prefilled, Queued

SECONDS = st.floats(0, 100)


@given(st.lists(st.tuples(st.sampled_from(["queued", "admitted", "joined", "token"]), SECONDS)), SECONDS)
def test_phases_add_up_to_the_seconds_of_the_row(events: list[tuple[str, float]], last_s: float):
    now, num_phases = 5.0, 1
    record = TimelineRecorder(now)
    for event, after_s in events:
        now += after_s
        num_phases += event != "token"
        match event:
            case "queued":
                record.queued(now, Queued(preempted_by="growth"))
            case "admitted":
                record.admitted(now)
            case "joined":
                record.joined(now, 0.0)
            case "token":
                record.token(now)
    phases, seconds = record.end(now + last_s)
    assert seconds == pytest.approx(now + last_s - 5)
    assert len(phases) == min(num_phases, MAX_PHASES)
    if num_phases <= MAX_PHASES:
        assert sum(phase.seconds for phase in phases) == pytest.approx(seconds)


def test_a_preempted_row_has_the_phases_of_its_life():
    record = TimelineRecorder(10.0, has_grammar=True)
    record.queued(11.0, Queued(num_ahead=2, num_decoding=1, num_prompt_tokens=300, expected_s=4.0))
    record.blocked("memory")
    record.admitted(14.0)
    record.restored(64, 0.5, None)
    record.encoded(100, 0.25, is_new=True)
    record.encoded(100, 0.25, is_new=False)
    record.computed(36, 1.0)
    assert record.token(16.0) is None
    record.joined(16.0, prefill_s=7.0)
    record.stepped(2, num_drafted=3, num_accepted=1, prefill_s=7.5)
    assert record.token(17.0) == 16.0
    record.queued(18.0, Queued(preempted_by="fairness"))
    record.admitted(19.0)
    record.joined(20.0, prefill_s=9.0)
    record.stepped(1, 0, 0, prefill_s=9.0)
    assert record.token(21.0) == 17.0
    phases, seconds = record.end(21.0)
    assert (seconds, record.first_token_s, record.last_token_s, record.num_preemptions) == (11.0, 6.0, 11.0, 1)
    compiling, queued, prefilled, decoded, again, _, last = phases
    assert compiling == Compiling(seconds=1.0, has_grammar=True)
    assert queued == Queued(
        seconds=3.0, num_ahead=2, num_decoding=1, num_prompt_tokens=300, expected_s=4.0, obstacle="memory"
    )
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.seconds, prefilled.num_tokens, prefilled.num_cached, prefilled.num_chunks) == (2.0, 36, 64, 1)
    assert ([image.seconds for image in prefilled.images], prefilled.others_s) == ([0.5], 0.5)
    assert decoded == Decoded(seconds=2.0, num_tokens=2, num_steps=1, num_drafted=3, num_accepted=1, stalled_s=0.5)
    assert again == Queued(seconds=1.0, preempted_by="fairness")
    assert last == Decoded(seconds=1.0, num_tokens=1, num_steps=1)


def test_what_belongs_to_another_phase_is_ignored():
    record = TimelineRecorder(0.0)
    record.blocked("rows")
    record.computed(5, 1.0)
    record.encoded(5, 1.0, is_new=True)
    record.stepped(1, 0, 0, 1.0)
    assert record.end(1.0) == ((Compiling(seconds=1.0),), 1.0)
