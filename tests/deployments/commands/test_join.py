"""`orchard join` and `orchard leave` up to the start of Ray; the whole way is in tests/cluster/test_head.py."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.cluster.facts import read_facts
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.join_client import HeadAnswer
from deployments.cluster.join_server import JoinServer
from deployments.commands import join
from deployments.commands.member_process import MemberSettings
from engine import gpus
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


@pytest.mark.parametrize("asked, offered", [("all", 4.0), (2, 2.0)])
def test_a_machine_that_joins_offers_as_many_engines_as_it_has_gpus_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Any, offered: float
):
    started: list[MemberSettings] = []
    monkeypatch.setattr(gpus.sys, "platform", "linux")
    monkeypatch.setattr(gpus, "has_cuda_backend", lambda: True)
    monkeypatch.setattr(gpus, "_num_gpus", lambda: 4)
    for name in (gpus.VISIBLE, "RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(join, "start_agent", lambda settings, folder: started.append(settings))
    monkeypatch.setattr(join, "_await_ray", lambda agent, folder: None)
    resources = {"mlx": 1.0, "mlx_scorer": 1.0}
    answer = HeadAnswer(read_facts([]), "a:1", "http://a", resources, asked, "auto", "10.0.0.2", "10.0.0.2", 0.0, 1)
    options = argparse.Namespace(head="10.0.0.1", object_store_mib=100, alone_after=None)
    folder = ClusterFolder(tmp_path / "cluster")
    folder.make()
    join._start(folder, answer, "10.0.0.2", options)
    assert started[0].resources == {"mlx": offered, "mlx_scorer": 1.0}


def test_a_machine_without_a_cluster_cannot_leave_one(orchard: Orchard):
    status, _, noted = orchard("leave")
    assert status == 1 and "belongs to no cluster" in noted


def test_a_head_is_told_how_it_ends(orchard: Orchard, tmp_path: Path):
    lock = ProcessLock(tmp_path / "home" / ".orchard" / "cluster" / "head.lock")
    status, _, noted = orchard("leave")
    lock.release()
    assert status == 1 and "this machine is the head of its cluster, by process" in noted and "Ctrl-C there" in noted
