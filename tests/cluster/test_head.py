"""The head of a cluster is killed, and comes back by the same command, while the other machine goes on answering."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from deployments.cluster.join_token import JoinToken
from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Member, members, serve, token_of
from tests.cluster.test_partition import LONG, Answer, Node

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/cluster/test_gcs_store.py finds the state of the GCS after both were killed"),
]

BACK_S = 500.0
"""On a busy machine Ray needs several tries; the other machines wait for 600 s."""
STREAM: dict[str, Any] = {"max_tokens": 300, "min_tokens": 300}
PAUSE_S = 2.0
GONE_S = 75.0
"""How long the head is away. Ray's default ends the other machines after 60 s."""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    with members(2) as made:
        yield made


class Load:
    """Requests at a machine, one after the other, every second one a long stream."""

    def __init__(self, node: Node):
        self._node = node
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            number = len(self.answers)
            fields: dict[str, Any] = {"stream": True, **STREAM} if number % 2 else {"max_tokens": 8}
            future: Future[Answer] = self._node.ask([{"role": "user", "content": f"{number} + 1?"}], **fields)
            self.answers.append(future.result(timeout=180))
            time.sleep(PAUSE_S)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_killed_head_comes_back_and_the_other_machine_never_stops(two: list[Member]):
    near, far = two
    serve(near).wait_for("orchard join")
    another = JoinToken.parse(token_of(near))
    refused = far.orchard("join", near.machine.address, "--token", str(JoinToken("0" * 64, another.fingerprint)))
    assert refused.wait() == 1 and "the token is not that of this cluster" in refused.output
    joined = far.orchard("join", near.machine.address, "--token", token_of(near))
    assert joined.wait() == 0, joined.output[-4000:]
    assert "✗" not in joined.output and joined.output.count("ready") == 2, joined.output
    assert (far.home / ".orchard" / "cluster" / "token").stat().st_mode & 0o777 == 0o600
    assert far.num_engines() == 2
    before, head_before = far.pids(), near.pids()
    assert len(before) == 4
    with Load(far.node) as load:
        killed_at = time.monotonic()
        near.machine.end_processes()
        time.sleep(GONE_S)
        assert far.pids() == before, "longer than Ray waits by default"
        restarted_at = time.monotonic()
        again = serve(near)
        again.wait_for("Orchard is ready", BACK_S)
        wait_until(lambda: len(near.pids()) == 4 and far.num_engines() == 2, READY_S, lambda: again.output[-4000:])
        back_at = time.monotonic()
    answers = load.answers
    assert "it goes on" in again.output
    assert far.pids() == before
    assert not set(near.pids().values()) & set(head_before.values())
    assert {(answer.status, answer.finish_reason) for answer in answers[1::2]} == {(200, "length")}
    assert [answer.error for answer in answers] == [None] * len(answers) and {a.status for a in answers} == {200}
    assert near.node.ask([{"role": "user", "content": "And now?"}]).result(timeout=60).status == 200
    print(  # noqa: T201
        f"head away {restarted_at - killed_at:.0f} s, back {back_at - restarted_at:.0f} s after the command; "
        f"{len(answers)} answers at the other machine, the slowest in {max(a.seconds for a in answers):.1f} s"
    )


def test_a_machine_leaves_without_an_error_and_its_ray_ends(two: list[Member]):
    near, far = two
    streams = [near.node.ask([{"role": "user", "content": f"{i}!"}], stream=True, **LONG) for i in range(6)]
    wait_until(lambda: all(answer.num_events > 2 for answer in near.node.asked[-6:]), READY_S)
    left = far.orchard("leave")
    assert left.wait() == 0, left.output
    answers = [future.result(timeout=180) for future in streams]
    assert [(answer.error, answer.finish_reason) for answer in answers] == [(None, "length")] * len(answers)
    wait_until(lambda: not far.machine.pids(), 60)
    again = far.orchard("leave")
    assert again.wait() == 1 and "belongs to no cluster" in again.output
    wait_until(lambda: near.num_engines() == 1, READY_S)
    assert near.node.ask([{"role": "user", "content": "Alone?"}]).result(timeout=60).status == 200
