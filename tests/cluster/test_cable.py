"""The cable of one of three machines is pulled and plugged in again, while streams run and requests arrive at all."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Member, members, serve, token_of
from tests.cluster.test_partition import Answer

pytestmark = [pytest.mark.cluster, pytest.mark.night("test_partition.py keeps the streams of a node that is cut off")]

STREAM: dict[str, Any] = {"stream": True, "max_tokens": 800, "min_tokens": 800}
ASKED_EVERY_S = 1.0
GIVEN_UP_S = 9.0
"""When Ray gives a machine up (serve_run/environment.py); its Ray then ends, and it joins again."""
AFTER_S = 10.0
"""How long requests are sent after the cable is back."""


@pytest.fixture(scope="module")
def three() -> Iterator[list[Member]]:
    with members(3) as made:
        head, *others = made
        serve(head).wait_for("orchard join")
        for other in others:
            assert other.orchard("join", head.machine.address, "--token", token_of(head)).wait() == 0
        wait_until(lambda: all(member.num_engines() == 3 for member in made), READY_S)
        yield made


def stream(member: Member, number: int) -> "Future[Answer]":
    return member.node.ask([{"role": "user", "content": f"{number}: What is 12 + 30?"}], **STREAM)


def ask_all(three: list[Member], seconds: float) -> list[list[Answer | Exception]]:
    """Send requests to each machine while its cable is out, and some time after; return what came of them."""
    cut, asked = three[-1], [list["Future[Answer]"]() for _ in three]
    cut.machine.pull_the_cable()
    began, is_out = time.monotonic(), True
    while time.monotonic() - began < seconds + AFTER_S:
        if is_out and time.monotonic() - began >= seconds:
            cut.machine.plug_the_cable()
            is_out = False
        for futures, member in zip(asked, three, strict=True):
            futures.append(member.node.ask([{"role": "user", "content": f"{len(futures)}?"}], max_tokens=4))
        time.sleep(ASKED_EVERY_S)
    return [outcomes(futures) for futures in asked]


@pytest.mark.parametrize("seconds", [5, 15, 60])
def test_a_cable_that_is_out_for_a_while_costs_no_answer_of_the_other_machines(
    three: list[Member], seconds: int, capsys: pytest.CaptureFixture[str]
):
    cut = three[-1]
    before = cut.pids()
    streams = [stream(three[number % 3], number) for number in range(9)]
    running = [answer for member in three for answer in member.node.asked[-3:]]
    wait_until(lambda: all(answer.num_events > 2 for answer in running), READY_S)
    said = ask_all(three, seconds)
    ends = outcomes(streams)
    plugged_in_at = time.monotonic() - AFTER_S
    wait_until(lambda: all(member.num_engines() == 3 for member in three), READY_S)
    is_kept = cut.pids() == before
    with capsys.disabled():
        print(f"\n{seconds} s: replicas kept: {is_kept}; 3 engines {time.monotonic() - plugged_in_at:.0f} s after it")  # noqa: T201
        for name, answers, own in zip(("head", "other", "cut off"), said, (ends[i::3] for i in range(3)), strict=True):
            good = [one for one in answers if is_whole(one)]
            slowest = max((one.seconds for one in good if isinstance(one, Answer)), default=0.0)
            print(f"  {name}: {len(good)} of {len(answers)} requests 200, the slowest in {slowest:.1f} s")  # noqa: T201
            print(f"    streams whole: {sum(map(is_whole, own))} of {len(own)}; {set(map(failure, own + answers))}")  # noqa: T201
    for answers, own in zip(said[:-1], (ends[0::3], ends[1::3]), strict=True):
        assert all(map(is_whole, answers + own)), set(map(failure, answers + own))
    if seconds < GIVEN_UP_S:
        assert is_kept and all(map(is_whole, said[-1] + ends[2::3])), set(map(failure, said[-1] + ends[2::3]))


def is_whole(outcome: Answer | Exception) -> bool:
    return failure(outcome) == ""


def failure(outcome: Answer | Exception) -> str:
    """Return why an answer is not whole; '' if it is."""
    if isinstance(outcome, Exception):
        return repr(outcome)
    return "" if outcome.status == 200 and outcome.error is None else f"{outcome.status} {outcome.error}"


def outcomes(futures: "list[Future[Answer]]") -> list[Answer | Exception]:
    """Wait for answers; return the error of a connection in the place of its answer."""
    found: list[Answer | Exception] = []
    for future in futures:
        error = future.exception(timeout=READY_S)
        assert error is None or isinstance(error, Exception)
        found.append(future.result() if error is None else error)
    return found
