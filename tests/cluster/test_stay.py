"""`orchard join --stay`, which a service runs: it leaves when it is stopped, and ends after `orchard leave`."""

import signal

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, members, serve, token_of

pytestmark = [pytest.mark.cluster, pytest.mark.night("commands/test_staying.py has it with other processes than Ray's")]


def test_a_member_that_stays_leaves_when_it_is_stopped():
    with members(2) as (head, far):
        served = serve(head)
        served.wait_for("orchard join")
        joined = far.orchard("join", head.machine.address, "--stay", "--token", token_of(head))
        joined.wait_for("Ctrl-C makes it leave")
        again = far.orchard("join", head.machine.address, "--stay")
        again.wait_for("Ctrl-C makes it leave")
        assert head.num_engines() == far.num_engines() == 2
        joined.process.send_signal(signal.SIGTERM)
        assert joined.wait() == 0 and "has left the cluster" in joined.output, joined.output[-4000:]
        assert again.wait() == 0 and "has left the cluster" in again.output, again.output[-4000:]
        wait_until(lambda: head.num_engines() == 1, READY_S)

        back = far.orchard("join", head.machine.address, "--stay")
        back.wait_for("Ctrl-C makes it leave")
        assert far.orchard("leave").wait() == 0
        assert back.wait() == 0, back.output[-4000:]
