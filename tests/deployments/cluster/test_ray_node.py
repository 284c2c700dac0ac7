import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from deployments.cluster import ports, ray_node
from deployments.cluster.ray_node import NodeOptions, RayFailed, RayNode, set_variables

FIRST_HANGS = """
import os, pathlib, subprocess, sys, time
directory = pathlib.Path(sys.argv[1])
first = not (directory / "tried").exists()
(directory / "tried").touch()
raylet = subprocess.Popen([directory / "raylet", "1" if first else "600"])
if not first:
    print("Ray runtime started.", flush=True)
time.sleep(600)
"""


class Program(NodeOptions):
    """Another program instead of `ray start`."""

    words: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return list(self.words)


def program(*words: str) -> Program:
    options = Program("127.0.0.1", {}, 0)
    object.__setattr__(options, "words", words)
    return options


def test_the_head_and_a_member_have_the_same_fixed_ports():
    head = NodeOptions("10.0.0.1", {"mlx": 1.0}, 2**27, secret_options=("--redis-password=secret",))
    member = NodeOptions("10.0.0.2", {"mlx": 1.0}, 2**27, "10.0.0.1:6379")
    for name, port in ports.NODE.items():
        assert f"--{name}={port}" in head.command() and f"--{name}={port}" in member.command()
    assert {"--head", "--port=6379", "--redis-password=secret", "--dashboard-host=127.0.0.1"} <= set(head.command())
    assert "--address=10.0.0.1:6379" in member.command() and "--head" not in member.command()
    assert "secret" not in repr(head)


def test_a_head_beside_a_member_shares_no_port_with_it_and_has_no_engine():
    beside = NodeOptions("10.0.0.2", {}, 2**27, is_beside=True).command()
    assert {"--head", "--port=6379", "--num-cpus=0", "--resources={}"} <= set(beside)
    assert "--num-cpus=0" not in NodeOptions("10.0.0.1", {"mlx": 1.0}, 2**27).command()
    assert not set(ports.BESIDE.values()) & {*ports.NODE.values(), ports.RELAY, ports.MEMBER, ports.JOIN}
    assert set(ports.BESIDE) == set(ports.NODE)


def test_variables_protect_the_cluster_and_keep_the_waits_of_the_operator(tmp_path: Path):
    environ = {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_reconnect_timeout_s": "60"}
    set_variables(environ, tmp_path / "token")
    assert environ["RAY_AUTH_MODE"] == "token" and environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert environ["RAY_gcs_rpc_server_reconnect_timeout_s"] == "60"


def test_a_start_whose_raylet_ends_is_repeated(tmp_path: Path):
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(os.path.realpath(sleep), tmp_path / "raylet")
    node = RayNode(program(sys.executable, "-c", FIRST_HANGS, str(tmp_path)), os.environ, tmp_path / "ray.log")
    node.start()
    family = [psutil.Process(node.pid), *psutil.Process(node.pid).children()]
    assert len(family) == 2 and not node.has_ended
    node.stop()
    assert node.has_ended and not any(process.is_running() for process in family)


def test_a_start_that_fails_each_time_shows_what_was_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_node, "STARTS", 2)
    failing = program(sys.executable, "-c", "print('no such option'); raise SystemExit(2)")
    with pytest.raises(RayFailed, match=r"not started in 2 tries.*\n.*no such option"):
        RayNode(failing, os.environ, tmp_path / "ray.log").start()
