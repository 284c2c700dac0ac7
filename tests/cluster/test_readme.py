"""The commands of README.md's "Several Macs", as they stand there, typed at two machines."""

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Command, Member, members
from tests.cluster.test_partition import LONG, ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("test_partition.py keeps the cluster, deployments/commands/ the verbs"),
]

PORT = 8000
EXAMPLE_ADDRESS, EXAMPLE_TOKEN, EXAMPLE_MODEL = "192.168.1.10", "TOKEN", "mlx-community/Qwen3.5-4B-MLX-4bit"
JOIN = re.compile(r"On each other machine: orchard join (\S+) --token (\S+)")
LEAVE_ALONE = 1


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    with members(2, PORT) as made:
        yield made


def commands_of_readme() -> list[str]:
    """Return the lines of the section's blocks of commands, in their order."""
    _, _, section = (ROOT / "README.md").read_text().partition("\n## Several Macs\n")
    section, _, _ = section.partition("\n## ")
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def typed(line: str, replaced: dict[str, str]) -> str:
    """Return a line with its examples replaced, each of which it must have."""
    if shutil.which("caffeinate") is None:
        line = line.removeprefix("caffeinate -is ")
    for example, value in replaced.items():
        assert example in line, line
        line = line.replace(example, value)
    return line


def done(command: Command, status: int = 0) -> str:
    """Wait for the end of a command; return what it has printed."""
    assert command.wait() == status, command.output[-4000:]
    return command.output


def test_the_readme_s_commands_make_a_cluster_show_it_and_take_a_machine_out_again(two: list[Member]):
    head, member = two
    serve, join, nodes, doctor, leave = commands_of_readme()
    served = head.type(typed(serve, {EXAMPLE_MODEL: "demo"}))
    served.wait_for("orchard join")
    found = JOIN.search(served.output)
    assert found is not None, served.output[-4000:]
    assert "✗" not in done(member.type(typed(join, {EXAMPLE_ADDRESS: found[1], EXAMPLE_TOKEN: found[2]})))
    for machine in two:
        assert done(machine.type(nodes)).count("ready") == 2
        findings = done(machine.type(doctor))
        assert f"the server at http://127.0.0.1:{PORT} is ready" in findings and "✗" not in findings, findings
    streams = [head.node.ask([{"role": "user", "content": f"{i}!"}], stream=True, **LONG) for i in range(6)]
    wait_until(lambda: all(answer.num_events > 2 for answer in head.node.asked), READY_S)
    nodes_of_answers = {answer.node_id for answer in head.node.asked}
    assert len(nodes_of_answers) == 2, "some of the answers run on the member"
    done(member.type(leave))
    answers = [stream.result(timeout=READY_S) for stream in streams]
    assert [(answer.error, answer.finish_reason) for answer in answers] == [(None, "length")] * len(answers)
    wait_until(lambda: not member.machine.pids(), READY_S)
    wait_until(lambda: head.num_engines() == 1, READY_S)
    assert head.node.ask([{"role": "user", "content": "Alone?"}]).result(timeout=READY_S).status == 200
    assert done(head.type(nodes)).count("ready") == 1
    assert "is the head" in done(head.type(leave), LEAVE_ALONE)
