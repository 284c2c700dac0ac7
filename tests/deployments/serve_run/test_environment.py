import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.serve_run import environment
from deployments.serve_run.environment import DEFAULTS, INIT_HOOK, RAY_INIT_HOOK, is_prepared, not_in_effect
from deployments.serve_run.orchard_command import EDITABLE

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_servers_use_the_loopback_address_on_every_system_and_ray_start_that_of_the_network(
    environ: dict, monkeypatch: pytest.MonkeyPatch, platform: str
):
    monkeypatch.setattr(sys, "platform", platform)
    for program, value in {"serve": "0", "orchard": "0", "ray": "1" if platform == "darwin" else None}.items():
        environ.clear()
        prepare(monkeypatch, f"/x/{program}", "status")
        assert environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == value
        assert is_prepared(environ) and not_in_effect(environ) == []
    environ.clear()
    environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    prepare(monkeypatch, "/x/serve", "run", "a.yaml")
    assert not_in_effect(environ) == ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 is set (Orchard's default: 0)"]


def test_variables_of_one_program_are_not_missed_in_the_processes_of_a_cluster(
    environ: dict, monkeypatch: pytest.MonkeyPatch
):
    prepare(monkeypatch, "/x/ray", "start")
    monkeypatch.setattr(sys, "argv", ["/x/default_worker.py"])
    assert is_prepared(environ) and not_in_effect(environ) == []


@pytest.mark.parametrize("program, raises", [("ray", True), ("serve", False)])
def test_ray_start_raises_a_low_limit_of_open_files(tmp_path: Path, program: str, raises: bool):
    script = tmp_path / program
    script.write_text("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    command = f"ulimit -Sn 256; exec {sys.executable} {script} start"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    soft, hard = map(int, done.stdout.split())
    assert soft == (min(hard, 65536) if raises else 256) and hard > 256


def test_files_that_macos_hides_are_named_with_the_command_that_repairs_them(
    environ: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    class Hidden(type(Path())):
        """A directory of macOS: `a.pth` in it is hidden."""

        def stat(self, **options: Any) -> Any:
            return SimpleNamespace(st_flags=stat.UF_HIDDEN) if self.name == "a.pth" else super().stat(**options)

    (tmp_path / "a.pth").touch()
    (tmp_path / "b.pth").touch()
    assert environment.hidden_files(tmp_path) is None
    reason = environment.hidden_files(Hidden(tmp_path))
    assert reason is not None and reason.startswith("macOS has marked a.pth in ")
    assert f"`chflags -R nohidden {sys.prefix}`" in reason
    monkeypatch.setattr(environment, "hidden_files", lambda: reason)
    assert not_in_effect({})[-1] == reason
    environment.set_defaults(environ)
    assert not_in_effect(environ) == []


def test_orchard_runs_without_pth_files_and_so_do_the_processes_that_it_starts(tmp_path: Path):
    """As in a folder of iCloud, where macOS hides these files. Python reads none from directories of PYTHONPATH."""
    installed = tmp_path / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix not in (".pth", ".start"):
            (installed / entry.name).symlink_to(entry)
    (installed / "orchard_command.py").unlink()
    shutil.copy(ROOT / "deployments/serve_run/orchard_command.py", installed)
    (installed / EDITABLE).write_text(f"{ROOT}\n")
    command = "import sys; sys.argv = ['orchard', 'check', 'demo']; from orchard_command import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(installed)}
    base: Any = sys
    done = subprocess.run([base._base_executable, "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model_type" in done.stdout or "qwen3_5" in done.stdout, done.stdout
    assert done.stderr.startswith(f"Python ignores the .pth files of {installed}: ")


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
    assert len({(default.name, default.programs) for default in DEFAULTS}) == len(DEFAULTS)


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
