"""Checks of `serve run` before Ray starts."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve.scripts import run as serve_run

from deployments.serve_run import hook
from deployments.serve_run.environment import RAY_INIT_HOOK
from deployments.serve_run.hook import watch_serve_run
from tests.e2e.server import free_port

OURS = "deployments.app:build_app"


class Watched:
    """Takes the place of the watcher, which polls Serve until the process ends."""

    started: list[tuple[Any, bool]]

    def __init__(self, config: Any, on_running: Any, owns_cluster: bool):
        self._of = config, owns_cluster

    def start(self) -> None:
        self.started.append(self._of)


class Checked:
    """Takes the place of the check of the model, a process of seconds: see tests/e2e/test_bad_config.py."""

    def __init__(self, config: Any): ...

    def wait(self) -> None: ...


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Any, bool]]]:
    """No note of a cluster, a home of its own, and the signal handlers of before afterwards."""
    Watched.started = []
    monkeypatch.setattr(hook, "Watcher", Watched)
    monkeypatch.setattr(hook, "finds_cluster", lambda: False)
    monkeypatch.setattr(hook, "ModelCheck", Checked)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(RAY_INIT_HOOK, "x")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield Watched.started
    for signum, handler in before.items():
        signal.signal(signum, handler)


def call(*words: str) -> None:
    """Call the hook as Ray does within `serve run` with these words."""
    with serve_run.make_context("run", list(words)):
        assert watch_serve_run({"a": 1}) == {"a": 1}


def run(tmp_path: Path, text: str, *options: str) -> None:
    path = tmp_path / "serve_config.yaml"
    path.write_text(text)
    call(*options, str(path))


def config(port: int, path: str = OURS, more: str = "") -> str:
    return f"http_options: {{host: 127.0.0.1, port: {port}}}\napplications: [{{import_path: '{path}'{more}}}]"


def test_valid_configuration_is_shown_and_watched(watched: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    port = free_port()
    run(tmp_path, config(port))
    ((served, owns_cluster),) = watched
    assert served.port == port and owns_cluster
    shown = capsys.readouterr().err
    assert f"127.0.0.1:{port}, this machine only, no keys" in shown
    assert "spec_prefill  off: spec_prefill.enabled is false" in shown
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert RAY_INIT_HOOK not in hook.os.environ


def test_applications_other_than_orchard_keep_their_signals_and_are_not_watched(
    watched: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, "http_option: 1\n" + config(1, "somebody.else:app"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert watched == [] and capsys.readouterr().err == ""


def test_invalid_configuration_ends_the_command_with_status_1(
    watched: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, config(1, more=", arg: {}"))
    assert ended.value.code == 1 and watched == []
    assert "serve_config.yaml is invalid:\n  application.arg: unknown key" in capsys.readouterr().err


def test_port_in_use_ends_the_command_unless_the_command_joins_a_cluster(
    watched: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            run(tmp_path, config(port))
        assert ended.value.code == 1 and watched == []
        assert f"port {port} of 127.0.0.1 is in use by process {hook.os.getpid()}" in capsys.readouterr().err
        run(tmp_path, config(port), "--address", "10.0.0.1:6379")
    ((_, owns_cluster),) = watched
    assert not owns_cluster


@pytest.mark.parametrize(
    ("options", "environ", "owns"),
    [
        ([], None, True),
        ([], "b:1", False),
        (["-a", "c:1"], None, False),
        (["--address=c:1"], "b:1", False),
    ],
)
def test_cluster_is_joined_that_the_command_line_or_the_environment_names(
    watched: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], environ: str | None, owns: bool
):
    if environ is not None:
        monkeypatch.setenv("RAY_ADDRESS", environ)
    run(tmp_path, config(free_port()), *options)
    ((_, owns_cluster),) = watched
    assert owns_cluster is owns


@pytest.mark.parametrize("name", ["serve_config.yaml", "a.yml", "config"])
@pytest.mark.parametrize(
    "options",
    [
        ["--runtime-env", "env.yaml"],
        ["--runtime-env=env.yaml", "--non-blocking"],
        ["--working-dir", "dir.yml", "-d", "app.yaml"],
        ["--name", "some.yaml", "--"],
    ],
)
def test_options_of_serve_run_are_not_taken_for_the_config_file(
    watched: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: list[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.yaml").write_text("env_vars: {A: b}")
    (tmp_path / name).write_text(config(port := free_port()))
    call(*options, name)
    ((served, _),) = watched
    assert served.port == port


def test_import_path_is_not_read_as_a_config_file(watched: list, capsys: pytest.CaptureFixture[str]):
    call("deployments.app:build_app", "model=demo.yaml")
    assert watched == [] and capsys.readouterr().err == ""
