"""A laptop that is taken away from its cluster serves alone, and joins again when it is back."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Member, members, serve
from tests.cluster.test_adopt import URL, join, log_of
from tests.cluster.test_head import BACK_S
from tests.cluster.test_partition import LONG

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/commands/test_member_process.py has the switch without Ray"),
]

ALONE_S = 20.0


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    with members(2) as made:
        yield made


def test_a_machine_whose_head_is_silent_serves_alone_until_the_head_answers_again(two: list[Member]):
    head, laptop = two
    serve(head).wait_for("orchard join")
    join(laptop, head, "--alone-after", str(ALONE_S))
    wait_until(lambda: head.num_engines() == laptop.num_engines() == 2, READY_S)
    before = laptop.pids()
    laptop.machine.pull_the_cable()
    cut_at = time.monotonic()
    stream = laptop.node.ask([{"role": "user", "content": "Count!"}], stream=True, **LONG)
    assert stream.result(timeout=180).error is None, "it ends within the time of a drain"
    wait_until(lambda: laptop.num_engines() == 1 and laptop.pids() != before, BACK_S, lambda: log_of(laptop))
    answer = laptop.node.ask([{"role": "user", "content": "Alone?"}]).result(timeout=120)
    alone_s = time.monotonic() - cut_at
    assert answer.status == 200 and "serves alone" in log_of(laptop)
    assert head.node.ask([{"role": "user", "content": "And here?"}]).result(timeout=120).status == 200
    laptop.machine.plug_the_cable()
    back_at = time.monotonic()
    wait_until(lambda: head.num_engines() == laptop.num_engines() == 2, BACK_S, lambda: log_of(laptop))
    back_s = time.monotonic() - back_at
    assert laptop.node.ask([{"role": "user", "content": "Together?"}]).result(timeout=120).status == 200
    print(f"alone {alone_s:.0f} s after the cut, together {back_s:.0f} s after its end\n{log_of(laptop)}")  # noqa: T201
    left = laptop.orchard("leave")
    assert left.wait() == 0, left.output
    wait_until(lambda: not laptop.machine.pids(), READY_S)
    assert head.orchard("nodes", "--url", URL).wait() == 0
