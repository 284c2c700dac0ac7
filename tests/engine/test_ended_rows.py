from typing import Any

from engine.ended_rows import MAX_TIMELINES, MAX_UNREAD, EndedRows


def test_each_ended_choice_is_taken_once_and_found_by_its_request_in_order_of_the_choices():
    ended = EndedRows()
    timelines: Any = [Timeline(1), Timeline(0), Timeline(0)]
    for row_id, timeline in zip(("a#0/1", "a#0/0", "b#1/0"), timelines, strict=True):
        ended.note(row_id, timeline)
    assert ended.of_request("a") == (timelines[1], timelines[0]) and ended.of_request("b") == (timelines[2],)
    assert ended.take() == timelines and ended.take() == []
    assert ended.of_request("a") and ended.of_request("a#0") == ()


def test_the_oldest_are_left_out_beyond_the_limits():
    ended = EndedRows()
    every: Any = [Timeline(0) for _ in range(MAX_UNREAD + 1)]
    for number, timeline in enumerate(every):
        ended.note(f"r{number}#{number}/0", timeline)
    assert ended.take() == every[1:]
    first_kept = len(every) - MAX_TIMELINES
    assert ended.of_request(f"r{first_kept - 1}") == () and ended.of_request(f"r{first_kept}") == (every[first_kept],)


class Timeline:
    def __init__(self, index: int):
        self.index = index
