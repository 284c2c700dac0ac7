import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.serve_run import environment
from deployments.serve_run.environment import DEFAULTS, INIT_HOOK, RAY_INIT_HOOK, is_prepared, not_in_effect


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr(environment.os, "environ", environ)
    return environ


def prepare(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", list(argv))
    environment.prepare()


def test_environment_variable_of_the_operator_is_kept(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    environ["RAY_health_check_period_ms"] = "7"
    prepare(monkeypatch, "/x/ray", "start")
    assert environ["RAY_health_check_period_ms"] == "7"
    assert environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert RAY_INIT_HOOK not in environ


@pytest.mark.parametrize(
    ("argv", "is_set"),
    [
        (["/x/.venv/bin/serve", "run", "serve_config.yaml"], True),
        (["serve", "run", "--runtime-env", "env.yaml", "config"], True),
        (["serve", "deploy", "serve_config.yaml"], False),
        (["serve"], False),
        (["ray", "run", "serve_config.yaml"], False),
    ],
)
def test_init_hook_is_set_only_for_serve_run(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, argv: list[str], is_set: bool
):
    prepare(monkeypatch, *argv)
    assert is_prepared(environ) and environ.get(RAY_INIT_HOOK) == (INIT_HOOK if is_set else None)


@pytest.mark.parametrize("argv", [["pytest"], ["/x/python"], ["-c"], ["-m"], ["ray_lightning"], ["notebook.py"], []])
def test_environment_of_other_programs_is_not_changed(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
):
    prepare(monkeypatch, *argv)
    assert environ.keys() <= {"PYTEST_CURRENT_TEST"}


def test_workers_run_at_the_niceness_of_the_command(environ: dict[str, str]):
    environment.set_defaults()
    assert environ["RAY_worker_niceness"] == "0"


@pytest.mark.parametrize("platform, is_set", [("darwin", True), ("linux", False)])
def test_multi_node_clusters_are_enabled_on_macs_only(
    environ: dict, monkeypatch: pytest.MonkeyPatch, platform: str, is_set: bool
):
    monkeypatch.setattr(sys, "platform", platform)
    environment.set_defaults()
    assert ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in environ) is is_set


def test_variable_not_in_effect_is_named_with_its_consequence():
    environ: dict[str, str] = {}
    environment.set_defaults(environ)
    assert not_in_effect(environ) == [] and is_prepared(environ)
    del environ["RAY_worker_niceness"]
    environ["RAY_health_check_period_ms"] = "7"
    niceness, period = not_in_effect(environ)
    assert niceness.startswith("RAY_worker_niceness=0 is not in effect: ") and "nice 15" in niceness
    assert period == "RAY_health_check_period_ms=7 is set (Orchard's default: 1000)"
    assert not is_prepared(environ)


def test_each_default_describes_its_absence_and_names_are_unique():
    assert all(default.without for default in DEFAULTS)
    assert len({default.name for default in DEFAULTS}) == len(DEFAULTS)


SHOW = "import os, sys; print(os.environ.get('RAY_SERVE_PROXY_USE_GRPC'), {heavy} & set(sys.modules))"
HEAVY = "{'ray', 'numpy', 'mlx', 'pydantic', 'deployments'}"


def start(tmp_path: Path, program: str) -> str:
    """Return the output of a program of this name with the installed start-up file."""
    script = tmp_path / program
    script.write_text(SHOW.format(heavy=HEAVY))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("program", ["serve", "ray", "orchard"])
def test_installed_pth_file_prepares_the_commands_and_imports_only_our_package(tmp_path: Path, program: str):
    assert start(tmp_path, program) == "1 {'deployments'}"


@pytest.mark.parametrize("program", ["pytest", "notebook.py", "serve.py"])
def test_installed_pth_file_imports_no_orchard_module_in_other_programs(tmp_path: Path, program: str):
    assert start(tmp_path, program) == "None set()"
