"""Members and heads that talk over loopback: who copies the log, and who follows whom."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deployments.cluster import members
from deployments.cluster.headship import Headship, write_headship
from tests.deployments.cluster.machines import (
    FIRST,
    HEAD,
    SECOND,
    SHARED,
    THIRD,
    HeadMachine,
    MemberMachine,
    choose_ports,
)

Member = Callable[[str, float], MemberMachine]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    choose_ports(monkeypatch)
    with ExitStack() as made:
        yield made


@pytest.fixture
def head(stack: ExitStack, tmp_path: Path) -> HeadMachine:
    made = HeadMachine(tmp_path / HEAD)
    stack.callback(made.stop)
    return made


@pytest.fixture
def member(stack: ExitStack, tmp_path: Path) -> Member:
    def make(address: str, joined_s: float) -> MemberMachine:
        made = MemberMachine(tmp_path / address, address, joined_s)
        stack.callback(made.stop)
        return made

    return make


def copies(machines: list[MemberMachine]) -> list[bool]:
    return [machine.folder.log_copy.exists() for machine in machines]


def test_the_two_longest_members_copy_the_log_and_all_learn_what_the_head_serves(head: HeadMachine, member: Member):
    three = [member(SECOND, 2.0), member(FIRST, 1.0), member(THIRD, 3.0)]
    for _ in range(2):
        assert [one.watch.tick() for one in three] == [True] * 3
    assert copies(three) == [True, True, False]
    assert three[0].folder.log_copy.read_bytes() == head.folder.store_log.read_bytes()
    assert [json.loads(one.folder.shared.read_text()) for one in three] == [SHARED] * 3
    view = {one["address"]: one for one in three[2].watch._members}
    assert sorted(view) == [FIRST, SECOND, THIRD] and view[FIRST]["node_id"] == f"node of {FIRST}"
    assert view[FIRST]["copy_age_s"] < 60 and view[THIRD]["copy_age_s"] is None


def test_another_member_copies_when_one_no_longer_answers(
    head: HeadMachine, member: Member, monkeypatch: pytest.MonkeyPatch
):
    first, second, third = member(FIRST, 1.0), member(SECOND, 2.0), member(THIRD, 3.0)
    for one in (first, second, third):
        one.watch.tick()
    assert copies([first, second, third]) == [True, True, False]
    heard = head.service._members._heard
    heard[FIRST] = heard[FIRST][0], heard[FIRST][1] - members.ANSWERS_S
    third.watch.tick()
    assert copies([third]) == [True]


def test_a_new_head_on_one_member_is_followed_by_the_others_and_the_old_one_by_nobody(
    head: HeadMachine, member: Member, stack: ExitStack, tmp_path: Path
):
    first, second = member(FIRST, 1.0), member(SECOND, 2.0)
    for one in (first, second, first, second):
        one.watch.tick()
    head.stop()
    write_headship(first.folder, Headship(FIRST, 2))  # as `orchard serve --adopt` does
    assert not first.watch.tick() and first.heads == [Headship(FIRST, 2)]
    assert not second.watch.tick() and second.heads == [], "a head that was heard just now is not replaced"
    second.be_silent(10)
    assert not second.watch.tick() and second.heads == [Headship(FIRST, 2)]
    new = HeadMachine(tmp_path / "new", FIRST, term=2)
    stack.callback(new.stop)
    assert second.watch.tick() and first.watch.tick()
    assert second.folder.log_copy.read_bytes() == new.folder.store_log.read_bytes()
    found = {one["address"]: one["copy_age_s"] is None for one in first.watch._members}
    assert found == {FIRST: True, SECOND: False}, "a head copies no log of its own"


def test_an_answer_of_a_lower_term_is_no_answer(head: HeadMachine, member: Member, stack: ExitStack):
    first = member(FIRST, 1.0)
    first.watch.headship = Headship(HEAD, 3)
    assert not first.watch.tick() and first.heads == [] and not first.folder.log_copy.exists()


def test_a_member_that_loses_its_head_keeps_its_copy(head: HeadMachine, member: Member, stack: ExitStack):
    first = member(FIRST, 1.0)
    assert first.watch.tick()
    copy = first.folder.log_copy.read_bytes()
    head.stop()
    assert not first.watch.tick() and first.folder.log_copy.read_bytes() == copy
    again = HeadMachine(head.folder.path)
    stack.callback(again.stop)
    assert first.watch.tick() and first.folder.log_copy.read_bytes() == copy
