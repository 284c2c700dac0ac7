"""Which ports the machines of a cluster open, and what a stranger gets there, is what deployments/README.md says."""

import re
from collections.abc import Iterator

import pytest

from deployments.cluster import ports
from tests.cluster.conftest import wait_until
from tests.cluster.listeners import PATHS, Listener, ask_as_stranger, listeners
from tests.cluster.members import CONFIG, READY_S, Member, members, serve, token_of
from tests.cluster.test_partition import PORT, ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("tests/e2e/test_start.py keeps the ports of a server of one machine, and the token of replicas"),
]

FIXED = {
    ports.JOIN,
    ports.GCS,
    ports.RELAY,
    ports.MEMBER,
    PORT,
    *ports.NODE.values(),
    *ports.HEAD_ONLY.values(),
    *ports.VARIABLES.values(),
}
WORKERS = range(ports.NODE["min-worker-port"], ports.NODE["max-worker-port"] + 1)
EXAMPLE_PORT = "8000"
"""The port of the HTTP API in the table."""
REFUSED = re.compile(r" (401|403)$| UNAUTHENTICATED$|^-NOAUTH$|^snapshots token$")
Row = tuple[str, str, str, str, str]
"""Process, machine, address, port, and what a stranger gets."""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Member]]:
    with members(2) as made:
        disk = f"{{engine: {{prefix_cache: {{disk: {{path: {made[0].home.parent}/snapshots}}}}}}}}"
        (made[0].home.parent / "config.yaml").write_text(CONFIG.replace("args: {}", f"args: {disk}"))
        head, member = made
        serve(head, dashboard=True).wait_for("orchard join")
        assert member.orchard("join", head.machine.address, "--token", token_of(head)).wait() == 0
        wait_until(lambda: head.num_engines() == 2, READY_S)
        yield made


def rows_of_readme() -> set[Row]:
    """Return the rows of the table, one for each machine and each address of a row that has several."""
    _, _, text = (ROOT / "deployments" / "README.md").read_text().partition("| process | on | address | port |")
    table, _, _ = text.partition("\n\n")
    rows: set[Row] = set()
    for line in table.splitlines()[2:]:
        process, on, addresses, found, answer = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for machine in ("head", "member") if on == "all" else (on,):
            for address in addresses.split(", "):
                rows |= {(process, machine, address, port, answer) for port in found.split(", ")}
    return rows


def found_rows(member: Member, name: str) -> set[Row]:
    """Return what listens on a machine, and answers strangers on it."""
    known = listeners(member.machine)
    said = ask_as_stranger(member.machine, sorted({target(one) for one in known}))
    return {row_of(one, member, name, said[target(one)]) for one in known}


def row_of(listener: Listener, member: Member, name: str, said: dict[str, list[str]]) -> Row:
    own = member.machine.address
    address = {"0.0.0.0": "any", own: "cluster"}.get(listener.address, "loopback")
    port = "any"
    if listener.port in WORKERS:
        port = f"{WORKERS.start} to {WORKERS.stop - 1}"
    elif listener.port in FIXED:
        port = str(listener.port).replace(str(PORT), EXAMPLE_PORT)
    assert said["no token"] and said["wrong token"], f"{listener} does not answer: its protocol is unknown"
    return listener.role, name, address, port, answer_in(said)


def answer_in(said: dict[str, list[str]]) -> str:
    """Return `refuses`, or the paths that answer; `metrics` for a server of Prometheus, which does at every path."""
    open_paths = [word for words in said.values() for word in words if not REFUSED.search(word)]
    paths = sorted({word.split()[1] for word in open_paths if not word.endswith(" 404")})
    return "metrics" if paths == sorted(PATHS) else ", ".join(paths) or "refuses"


def target(listener: Listener) -> str:
    address = "127.0.0.1" if listener.address == "0.0.0.0" else listener.address
    return f"{address}:{listener.port}"


def test_the_ports_of_head_and_member_are_those_of_the_table(two: list[Member]):
    found = set[Row]()
    for member, name in zip(two, ("head", "member"), strict=True):
        found |= found_rows(member, name)
    listed = rows_of_readme()
    assert found - listed == set(), "listens, and is not in the table of deployments/README.md"
    assert listed - found == set(), "is in the table of deployments/README.md, and does not listen"
