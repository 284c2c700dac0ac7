"""A machine leaves the cluster: its conversations go on at the other one, with their prefixes; then it comes back."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import CONFIG, READY_S, Command, Member, members, serve, token_of
from tests.cluster.test_partition import ANSWER_TIMEOUT_S, Answer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("engine/test_take_over.py and deployments/dispatch/test_hand_over.py keep all but the processes"),
]

CACHE = "args: {engine: {prefix_cache: {disk: {path: ~/snapshots}}}}"
SYSTEM = " ".join(f"Rule {i}: the {i}th apple is {'red' if i % 3 else 'green'}." for i in range(40))
STORY = " ".join(f"The {i}th pear costs {i} cents." for i in range(60))
NUM_CONVERSATIONS = 8
MIN_CACHED = 600
"""Tokens of the system part and the story, at least."""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    assert "args: {}" in CONFIG
    with members(2, config=CONFIG.replace("args: {}", CACHE)) as both:
        yield both


def join(far: Member, near: Member) -> Command:
    joined = far.orchard("join", near.machine.address, "--token", token_of(near))
    assert joined.wait() == 0, joined.output[-4000:]
    wait_until(lambda: near.num_engines() == 2, READY_S)
    return joined


def turn(member: Member, talk: list[dict[str, Any]], question: str) -> Answer:
    """Ask the next question of a conversation, which then has the answer as well."""
    talk.append({"role": "user", "content": question})
    answer = member.node.ask(talk, max_tokens=24, min_tokens=24).result(timeout=ANSWER_TIMEOUT_S)
    assert answer.status == 200, answer.error
    talk.append({"role": "assistant", "content": answer.text})
    return answer


def fetch_of(member: Member, node_id: str) -> dict[str, Any]:
    """Return the figures of the exchange of the engine on a node."""
    return next(one["fetch"] for one in member.node.get("/v1/cache")["engines"] if one["node_id"] == node_id)


def ids_of(near: Member) -> tuple[str, str]:
    """Return the ids of this machine and of the other one."""
    status = near.node.get("/v1/status")
    own = status["ingress"][0]["node_id"]
    return own, next(one["node_id"] for one in status["engines"] if one["node_id"] != own)


def test_the_next_turn_after_a_machine_has_left_is_a_hit_at_the_other_one(two: list[Member]):
    near, far = two
    serve(near).wait_for("orchard join")
    join(far, near)
    near_id, far_id = ids_of(near)
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(NUM_CONVERSATIONS)]
    homes = [turn(near, talk, f"{number}: {STORY} What is {number} + 30?").node_id for number, talk in enumerate(talks)]
    homes = [turn(near, talk, "And twice as much?").node_id for talk in talks]
    moving = [talk for talk, home in zip(talks, homes, strict=True) if home == far_id]
    assert moving, "some conversations live at the machine that leaves"
    left = far.orchard("leave")
    assert left.wait() == 0, left.output
    assert "snapshots are at other nodes" in left.output and "not moved" not in left.output, left.output
    taken = fetch_of(near, near_id)
    assert taken["taken_over"]["drain"] >= len(moving) and not taken["not_taken_over"]
    wait_until(lambda: near.num_engines() == 1, READY_S)
    answers = [turn(near, talk, "And half of it?") for talk in moving]
    assert {answer.node_id for answer in answers} == {near_id}
    assert min(answer.num_cached for answer in answers) > MIN_CACHED
    assert fetch_of(near, near_id)["num_fetched"] == taken["num_fetched"], "nothing had to be fetched for these turns"


def test_a_machine_that_joins_warms_itself_by_what_prompts_share(two: list[Member]):
    near, far = two
    for number in range(2):
        talk = [{"role": "system", "content": SYSTEM.replace("apple", "plum")}]
        turn(near, talk, f"{number}: {STORY} What is {number} + 30?")
    join(far, near)
    _, far_id = ids_of(near)
    wait_until(lambda: fetch_of(near, far_id)["taken_over"].get("warm_up", 0) > 0, READY_S)
    assert not fetch_of(near, far_id)["failures"]
