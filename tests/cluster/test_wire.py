"""All that passes between two machines of a cluster, from the join on, is recorded: no token and no prompt is in it."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.join_token import read_join_token
from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Member, members, serve, token_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/cluster/test_mutual_tls.py and test_relay_tls.py record our own sockets"),
]

ALL_PROTOCOLS = 0x0003
"""ETH_P_ALL: packets of both directions."""
PROMPT, SYSTEM = "the heron waits at the seventh lock", "answer like the keeper of a lighthouse"
CONTROL = "what is not encrypted is recorded"
NUM_QUESTIONS = 24


class Recorder:
    """Records every packet of a machine's interface, as long as it is open."""

    def __init__(self, member: Member):
        self.packets = bytearray()
        self._stop = threading.Event()
        self._done = member.machine.submit(self._run)

    def _run(self) -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as packets:
            packets.bind(("eth0", ALL_PROTOCOLS))
            packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
            packets.settimeout(0.5)
            while not self._stop.is_set():
                try:
                    self.packets += packets.recv(2**17)
                except TimeoutError:
                    continue

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._done.result(timeout=30)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    with members(2) as made:
        yield made


def control(head: Member, far: Member) -> None:
    """Ask a port that is not encrypted, so that the recorder has something to show."""

    def ask() -> int:
        url = f"http://{head.machine.address}:{ports.VARIABLES['AUTOSCALER_METRIC_PORT']}/metrics"
        return httpx.get(url, headers={"X-Control": CONTROL}, timeout=30).status_code

    assert far.machine.submit(ask).result(timeout=60) == 200


def ask_both(two: list[Member]) -> None:
    """Ask at both machines, until each has answered questions that were asked at the other one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    asked = [
        member.node.ask([*messages, {"role": "user", "content": f"{PROMPT} {i}"}], max_tokens=16)
        for i in range(NUM_QUESTIONS // 2)
        for member in two
    ]
    answers = [future.result(timeout=120) for future in asked]
    assert {answer.status for answer in answers} == {200} and len({answer.node_id for answer in answers}) == 2


def test_two_machines_answer_and_their_wire_shows_neither_token_nor_prompt(two: list[Member]):
    head, far = two
    serve(head).wait_for("orchard join")
    with Recorder(far) as recorder:
        joined = far.orchard("join", head.machine.address, "--token", token_of(head))
        assert joined.wait() == 0, joined.output[-4000:]
        wait_until(lambda: head.num_engines() == far.num_engines() == 2, READY_S)
        began = len(recorder.packets)
        ask_both(two)
        control(head, far)
        time.sleep(2)
    recorded, folder = bytes(recorder.packets), ClusterFolder(head.home / ".orchard" / "cluster")
    secret = read_join_token(folder)
    assert secret is not None and CONTROL.encode() in recorded
    assert len(recorded) - began > NUM_QUESTIONS * len(PROMPT), "some of the questions have crossed the wire"
    shown = {"token": folder.token(), "secret of the join token": secret.secret, "prompt": PROMPT, "system": SYSTEM}
    assert [name for name, text in shown.items() if text.encode() in recorded] == []
    private = Path(folder.tls.authority_key).read_text().splitlines()[1]
    assert private.encode() not in recorded
    print(f"{len(recorded)} bytes recorded, {len(recorded) - began} of them with the questions")  # noqa: T201


def test_a_revoked_machine_ends_its_ray_and_joins_again_only_with_the_new_token(two: list[Member]):
    head, far = two
    old = token_of(head)
    revoked = head.orchard("revoke", far.machine.address)
    assert revoked.wait() == 0, revoked.output
    assert f"The certificate of {far.machine.address} is revoked" in revoked.output
    wait_until(lambda: not far.machine.pids(), READY_S)
    assert "its certificate was revoked. Ray ends on this machine." in log_of(far)
    wait_until(lambda: head.num_engines() == 1, READY_S)
    for words, said in (([], "its certificate was revoked"), (["--token", old], "the token is not that")):
        again = far.orchard("join", head.machine.address, *words)
        assert again.wait() == 1 and said in again.output, again.output[-4000:]
    joined = far.orchard("join", head.machine.address, "--token", token_of(head))
    assert joined.wait() == 0, joined.output[-4000:]
    wait_until(lambda: head.num_engines() == far.num_engines() == 2, READY_S)


def log_of(member: Member) -> str:
    return (member.home / ".orchard" / "cluster" / "member.log").read_text()
