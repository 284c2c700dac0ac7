"""Which ports the machines of a cluster open, and what a stranger gets there, is what deployments/README.md says."""

import re
from collections.abc import Iterator

import pytest

from deployments.cluster import ports
from deployments.cluster.certificates import Authority, new_key, signing_request
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.issuing import read_authority
from deployments.cluster.ledger import Ledger, note_issued, revoke
from tests.cluster.conftest import wait_until
from tests.cluster.listeners import PATHS, Identity, Listener, ask_as_stranger, listeners
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
REFUSED = re.compile(r" (401|403)$| UNAUTHENTICATED$|^-NOAUTH$|^snapshots token$|^no TLS$|^TLS refuses$")
REVOKED = "revoked"
REVOKED_ADDRESS = "10.213.77.99"
Row = tuple[str, str, str, str, str, str]
"""Process, machine, address, port, what a stranger gets, and what a machine gets whose certificate was revoked."""


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


@pytest.fixture(scope="module")
def identities(two: list[Member], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    """Machines that know the token: without a certificate, with one of another authority, and with a revoked one."""
    folder = ClusterFolder(two[0].home / ".orchard" / "cluster")
    directory, token, authority = tmp_path_factory.mktemp("identities"), folder.token(), str(folder.tls.authority)
    made = {"no certificate": Identity(authority, token=token), "no certificate, no token": Identity(authority)}
    for name, issuer in {"another authority": Authority.new(), REVOKED: read_authority(folder)}.items():
        key = new_key()
        certificate = issuer.issue(signing_request(key, REVOKED_ADDRESS), REVOKED_ADDRESS)
        files = directory / f"{name}.pem", directory / f"{name}.key"
        for file, text in zip(files, (certificate, key), strict=True):
            file.write_text(text)
        made[name] = Identity(authority, str(files[0]), str(files[1]), token)
        if name == REVOKED:
            note_issued(folder, certificate, REVOKED_ADDRESS)
            revoke(folder, REVOKED_ADDRESS)
    ledgers = [Ledger(member.home / ".orchard" / "cluster" / "machines.json") for member in two]
    wait_until(lambda: all(REVOKED_ADDRESS in [one.address for one in ledger.machines()] for ledger in ledgers), 60)
    return made


def rows_of_readme() -> set[Row]:
    """Return the rows of the table, one for each machine and each address of a row that has several."""
    _, _, text = (ROOT / "deployments" / "README.md").read_text().partition("| process | on | address | port |")
    table, _, _ = text.partition("\n\n")
    rows: set[Row] = set()
    for line in table.splitlines()[2:]:
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        process, on, addresses, found, answer, revoked = cells
        process = process.partition(", ")[0]  # what is behind it is for the reader
        for machine in ("head", "member") if on == "all" else (on,):
            for address in addresses.split(", "):
                rows |= {(process, machine, address, port, answer, revoked) for port in found.split(", ")}
    return rows


def found_rows(member: Member, name: str, identities: dict[str, Identity]) -> set[Row]:
    """Return what listens on a machine, and answers strangers on it."""
    known = listeners(member.machine)
    said = ask_as_stranger(member.machine, sorted({target(one) for one in known}), identities)
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
    if REVOKED not in said:  # it does not speak TLS, and answers every machine alike
        return listener.role, name, address, port, answer_in(said), "the same"
    revoked = "refuses" if all(map(REFUSED.search, said.pop(REVOKED))) else "answers"
    return listener.role, name, address, port, answer_in(said), revoked


def answer_in(said: dict[str, list[str]]) -> str:
    """Return `refuses`, or the paths that answer; `metrics` for a server of Prometheus, which does at every path."""
    open_paths = [word for words in said.values() for word in words if not REFUSED.search(word)]
    paths = sorted({word.split()[1] for word in open_paths if not word.endswith(" 404")})
    return "metrics" if paths == sorted(PATHS) else ", ".join(paths) or "refuses"


def target(listener: Listener) -> str:
    address = "127.0.0.1" if listener.address == "0.0.0.0" else listener.address
    return f"{address}:{listener.port}"


def test_the_ports_of_head_and_member_are_those_of_the_table(two: list[Member], identities: dict[str, Identity]):
    found = set[Row]()
    for member, name in zip(two, ("head", "member"), strict=True):
        found |= found_rows(member, name, identities)
    listed = rows_of_readme()
    assert found - listed == set(), "listens, and is not in the table of deployments/README.md"
    assert listed - found == set(), "is in the table of deployments/README.md, and does not listen"
