"""`orchard doctor`: each finding from readings, on Linux and as on a Mac, and the command on this machine."""

import errno
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.cluster.cluster_view import ClusterView, Copy
from deployments.commands.doctor_checks import CHECKS
from deployments.commands.doctor_readings import Readings
from tests.deployments.commands.conftest import Orchard
from tests.e2e.server import free_port

LINUX = Readings(
    system="Linux",
    machine="x86_64",
    python=(3, 11),
    total_bytes=64 * 2**30,
    available_bytes=32 * 2**30,
    server_url="http://127.0.0.1:8000",
    server_problem="no server",
    disk={"/tmp": 100 * 2**30},
    versions={"mlx": ("0.32.4", "0.32.4")},
)
MAC = replace(
    LINUX,
    system="Darwin",
    machine="arm64",
    macos=(15, 2),
    is_translated=False,
    pressure=1,
    wired_limit_mb=0,
    sleep_minutes=0,
    is_low_power=False,
)
VIEW = ClusterView("10.0.0.1", 1.0, 1, (Copy("10.0.0.2", 3.0),))
PEER: dict[str, Any] = {"peer": "10.0.0.2:6379", "peer_errno": errno.EHOSTUNREACH}


@pytest.mark.parametrize("found", [LINUX, MAC], ids=["linux", "mac"])
def test_a_healthy_machine_has_no_red_and_no_yellow_finding(found: Readings):
    findings = {name: check(found) for name, check in CHECKS.items()}
    assert {name for name, one in findings.items() if one.state in ("red", "yellow")} == set()
    only_on_macs = {name for name, one in findings.items() if one.text == "only on macOS"}
    assert only_on_macs == ({"processor", "environment", "wired limit", "sleep"} if found is LINUX else set())


@pytest.mark.parametrize("view", [VIEW, replace(VIEW, num_members=0, copies=())], ids=["copied", "no members"])
def test_a_cluster_in_order_is_green(view: ClusterView):
    finding = CHECKS["cluster"](replace(LINUX, cluster=view))
    assert (finding.state, finding.text) == ("green", view.describe())


@pytest.mark.parametrize(
    ("changes", "name", "state", "said"),
    [
        ({"macos": (13, 6)}, "system", "red", "macOS 13.6: MLX needs 14"),
        ({"system": "Windows", "macos": None}, "system", "red", "Windows is not supported"),
        ({"is_translated": True}, "processor", "red", "Rosetta"),
        ({"machine": "x86_64"}, "processor", "red", "Apple silicon"),
        ({"python": (3, 15)}, "Python", "red", "3.15"),
        ({"hidden_files": "macOS has marked a.pth"}, "environment", "red", "chflags"),
        ({"versions": {"mlx": (None, "1"), "ray": ("2", "2")}}, "versions", "red", "mlx is missing (pinned: 1)"),
        ({"pressure": 4}, "memory", "red", "critical"),
        ({"total_bytes": 4 * 2**30}, "memory", "yellow", "4.00 GiB"),
        ({"wired_limit_mb": 60000}, "wired limit", "yellow", "60000"),
        ({"sleep_minutes": 10}, "sleep", "yellow", "10 min"),
        ({"is_low_power": True}, "sleep", "yellow", "low power"),
        ({"disk": {"/x": 2**20}}, "disk", "red", "1 MiB free for /x"),
        ({"disk": {"/x": 2**32}}, "disk", "yellow", "4.00 GiB"),
        ({"hard_open_files": 256}, "open files", "yellow", "256"),
        ({"config_path": "c.yaml", "config_mistakes": "c.yaml is invalid"}, "configuration", "red", "invalid"),
        ({"keys_problem": "mode 0644"}, "keys", "red", "0644"),
        ({"checked_model": True, "model_problem": "no such directory"}, "model", "red", "demo: no such directory"),
        ({"asked_hub": True, "hub_problem": "no route"}, "hub", "yellow", "no route"),
        ({"port_problem": "port 8000 is in use"}, "port", "red", "in use"),
        ({"ray_note": "10.0.0.1:6379"}, "Ray", "red", "does not answer"),
        ({"ray_pids": (7,)}, "Ray", "yellow", "7"),
        ({"ray_dir": "/a/very/long/folder/for/the/files/of/ray"}, "Ray's folder", "red", "40 bytes"),
        ({"cluster": replace(VIEW, copies=())}, "cluster", "yellow", "no machine has an up-to-date copy"),
        ({"cluster": replace(VIEW, copies=(Copy("10.0.0.2", 90.0),))}, "cluster", "yellow", "10.0.0.2 (90 s old)"),
        ({"cluster": replace(VIEW, heard_age_s=80.0)}, "cluster", "red", "the head is silent: head 10.0.0.1"),
        ({"cluster_problem": "no answer at port 6388"}, "cluster", "red", "no answer at port 6388"),
        ({"token_mode": 0o644, "is_token_exposed": True}, "Ray's token", "red", "0644"),
        ({**PEER, "peer_seconds": 0.001}, "local network", "red", "privacy"),
        ({**PEER, "peer_seconds": 3.0}, "local network", "red", "EHOSTUNREACH"),
        ({"server_problem": None, "server_unready": "loading"}, "server", "red", "loading"),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(changes: dict[str, Any], name: str, state: str, said: str):
    finding = CHECKS[name](replace(MAC, **changes))
    assert finding.state == state and finding.remedy
    assert said in finding.text or said in finding.remedy


def test_the_command_checks_this_machine(orchard: Orchard, tmp_path: Path):
    url = f"http://127.0.0.1:{free_port()}"
    status, out, _ = orchard("doctor", "--json", "--quick", "--url", url)
    found = {one["check"]: one for one in json.loads(out)}
    assert list(found) == list(CHECKS) and found["server"]["state"] == "none" and found["versions"]["state"] == "green"
    assert status == (1 if any(one["state"] == "red" for one in found.values()) else 0)
    (tmp_path / "serve_config.yaml").write_text("applications: [{import_path: 'deployments.app:build_app', x: 1}]")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, out, _ = orchard("doctor", "--quick", "--peer", f"127.0.0.1:{port}", "--url", url)
    assert status == 1 and "✗ configuration" in out and f"127.0.0.1:{port} can be reached" in out
