"""`orchard service`: the files it writes, read back, and its commands, with programs that note how they are called."""

import configparser
import json
import os
import plistlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from deployments.commands.service import MEMBER_STOP_S, launch_agent, systemd_unit
from tests.deployments.commands.conftest import Orchard

COMMAND = ["/opt/my env/bin/python", "/opt/my env/bin/orchard", "serve", 'a"b\\c', "100% $HOME", "ü"]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of both systems that append their arguments to this file, and print the state `state`."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name in ("systemctl", "launchctl"):
        (programs / name).write_text(f'#!/bin/sh\necho "$0 $*" >>{calls}\ncat {tmp_path}/state 2>/dev/null\nexit 0\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return calls


def test_the_plist_says_how_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    service = launch_agent(COMMAND, tmp_path / "a b")
    found = plistlib.loads(service.content)
    assert found["ProgramArguments"] == ["/usr/bin/caffeinate", "-is", *COMMAND]
    assert found["WorkingDirectory"] == str(tmp_path / "a b") and found["Umask"] == 0o77
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["ExitTimeOut"] > 25
    assert service.file == tmp_path / "Library/LaunchAgents/orchard.serve.plist"
    assert "local network" in service.note


def test_the_unit_says_how_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    service = systemd_unit(COMMAND, tmp_path / "50% off")
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read_string(service.content.decode())
    words = shlex.split(unit["Service"]["ExecStart"])
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == COMMAND
    assert unit["Service"]["WorkingDirectory"].endswith("/50%% off") and unit["Service"]["KillMode"] == "mixed"
    assert int(unit["Service"]["TimeoutStopSec"]) > 25 and unit["Install"]["WantedBy"] == "default.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path):
    (tmp_path / "orchard.service").write_bytes(systemd_unit(["/bin/true", "a b", "100%"], tmp_path).content)
    verify = ["systemd-analyze", "--user", "verify", str(tmp_path / "orchard.service")]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(verify, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "orchard.service" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("system", "runs", "file"),
    [
        ("Linux", "ActiveState=active\nMainPID=77", ".config/systemd/user/orchard.service"),
        ("Darwin", "\tstate = running\n\tpid = 77", "Library/LaunchAgents/orchard.serve.plist"),
    ],
)
def test_install_is_idempotent_and_remove_leaves_nothing(
    orchard: Orchard, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, runs: str, file: str
):
    monkeypatch.setattr("platform.system", lambda: system)
    home, path = tmp_path / "home", tmp_path / "home" / file
    home.mkdir()
    assert orchard("service", "status")[:1] == (1,)
    assert orchard("service", "install", "--dry-run", "--", "smollm2")[0] == 0
    assert not calls.exists() and not list(home.iterdir())
    assert orchard("service", "install", "--", "smollm2")[0] == 0
    assert path.exists() and b"smollm2" in path.read_bytes()
    (tmp_path / "state").write_text(runs)
    assert "process 77" in orchard("service", "status")[1]
    before = calls.read_text().count("\n")
    status, _, err = orchard("service", "install", "--", "smollm2")
    assert status == 0 and "as it should be" in err and calls.read_text().count("\n") == before + 1, "it only looked"
    assert orchard("service", "install", "--", "demo")[0] == 0 and b"smollm2" not in path.read_bytes()
    (tmp_path / "state").write_text("ActiveState=failed\nResult=exit-code")
    assert json.loads(orchard("service", "status", "--json")[1])["running"] is False
    assert orchard("service", "remove")[0] == 0
    assert [one for one in home.rglob("*") if one.is_file()] == []
    assert orchard("service", "remove")[0] == 0, "there is nothing to do"


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_a_member_joins_stays_and_has_time_to_leave(orchard: Orchard, monkeypatch: pytest.MonkeyPatch, system: str):
    monkeypatch.setattr("platform.system", lambda: system)
    plan = ("service", "install", "--member", "studio.local", "--dry-run", "--", "--interface", "en0")
    status, shown, _ = orchard(*plan)
    words = re.findall(r"[^\s\"<>]+", re.sub(r"</?\w+>", " ", shown))
    begin = words.index("join")
    assert status == 0 and words[begin : begin + 5] == ["join", "studio.local", "--stay", "--interface", "en0"]
    assert str(MEMBER_STOP_S) in shown


def test_a_system_without_a_manager_of_services_is_told_and_left_alone(
    orchard: Orchard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = orchard("service", "install")
    assert status == 1 and "nothing was done" in err and not (tmp_path / "home").exists()
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert orchard("service", "status")[0] == 1
