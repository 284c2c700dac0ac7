"""`orchard join` and `orchard leave` up to the start of Ray; the whole way is in tests/cluster/test_head.py."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.cluster.facts import read_facts
from deployments.cluster.join_server import JoinServer
from engine.process_lock import ProcessLock
from tests.deployments.commands.conftest import Orchard

SECRET = "0123456789abcdef" * 4
TOKEN, ANOTHER = f"orchard1-{SECRET}-no-tls", f"orchard1-{SECRET[::-1]}-no-tls"


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a head with another Python."""
    facts = replace(read_facts([("demo", None)]), python="3.11.99").as_json()
    said = {
        "facts": facts,
        "gcs": "127.0.0.1:6379",
        "url": "http://127.0.0.1:8000",
        "resources": {"mlx": 1.0},
        "engines_per_node": "all",
        "device": "auto",
        "term": 1,
    }
    server = JoinServer("127.0.0.1", 0, SECRET, lambda: said)
    server.start()
    yield f"127.0.0.1:{server.port}"
    server.stop()


def test_a_machine_that_differs_is_refused_with_all_lines_and_changes_nothing(
    orchard: Orchard, head: str, tmp_path: Path
):
    status, shown, noted = orchard("join", head, "--token", TOKEN)
    assert status == 2 and "This machine has not joined" in noted
    lines = shown.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("✗")] == ["✗ Python", "✗ address"]
    assert sum(line.startswith("✓") for line in lines) == 11
    assert any("→ uv sync --python 3.11.99" in line for line in lines)
    assert not (tmp_path / "home" / ".orchard" / "cluster" / "token").exists()


def test_the_comparison_as_json(orchard: Orchard, head: str):
    status, shown, _ = orchard("join", head, "--token", TOKEN, "--check", "--json")
    lines = {line["name"]: line for line in json.loads(shown)}
    assert status == 2 and lines["Python"]["remedy"] == "uv sync --python 3.11.99"
    assert lines["Orchard"]["is_green"] is True


def test_what_is_missing_for_a_comparison_is_named(orchard: Orchard, head: str):
    assert orchard("join", head) == (1, "", "error: give the token that the head has printed, by --token\n")
    for wrong, said in {SECRET: "of an earlier version of Orchard", "another": "a token of 7 characters"}.items():
        status, _, noted = orchard("join", head, "--token", wrong)
        assert status == 1 and said in noted and "join_token" in noted
    status, _, noted = orchard("join", head, "--token", ANOTHER)
    assert status == 1 and "the token is not that of this cluster" in noted
    status, _, noted = orchard("join", head, "--token", TOKEN, "--interface", "none0")
    assert status == 1 and "--interface is 'none0'" in noted


def test_a_machine_without_a_cluster_cannot_leave_one(orchard: Orchard):
    status, _, noted = orchard("leave")
    assert status == 1 and "belongs to no cluster" in noted


def test_a_head_is_told_how_it_ends(orchard: Orchard, tmp_path: Path):
    lock = ProcessLock(tmp_path / "home" / ".orchard" / "cluster" / "head.lock")
    status, _, noted = orchard("leave")
    lock.release()
    assert status == 1 and "this machine is the head of its cluster, by process" in noted and "Ctrl-C there" in noted
