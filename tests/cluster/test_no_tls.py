"""A cluster with --no-tls: it serves, says that it is not encrypted, and its wire shows what test_wire.py looks for."""

import pytest

from deployments.cluster.folder import ClusterFolder
from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, members, serve, token_of
from tests.cluster.test_wire import PROMPT, Recorder, ask_both

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/serve_run/test_head.py and deployments/commands/test_join.py join without TLS"),
]


def test_a_cluster_without_tls_serves_and_can_be_read_on_its_way():
    with members(2) as two:
        head, far = two
        served = serve(head, tls=False)
        served.wait_for("orchard join")
        assert "--no-tls: all traffic of the cluster can be read on its way" in served.output
        token, folder = token_of(head), ClusterFolder(far.home / ".orchard" / "cluster")
        assert token.endswith("-no-tls")
        joined = far.orchard("join", head.machine.address, "--token", token)
        assert joined.wait() == 0 and "can be read on its way" in joined.output, joined.output[-4000:]
        assert not folder.tls.certificate.exists()
        wait_until(lambda: head.num_engines() == far.num_engines() == 2, READY_S)
        with Recorder(far) as recorder:
            ask_both(two)
        assert PROMPT.encode() in recorder.packets and folder.token().encode() in recorder.packets
        assert far.orchard("leave").wait() == 0
        again = far.orchard("join", head.machine.address)
        assert again.wait() == 0 and "can be read on its way" in again.output, again.output[-4000:]
