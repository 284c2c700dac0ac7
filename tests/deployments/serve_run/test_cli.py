"""`orchard serve` up to the start of Ray: as a process, as an operator starts it, where the process itself matters."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.commands import program
from deployments.serve_run.config_file import default_config, read_config
from tests.e2e.server import SHIPPED_CONFIG, free_port
from tests.support.night import some_at_night

ORCHARD = Path(sys.executable).parent / "orchard"
Here = Callable[..., tuple[int, str]]


def orchard(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [str(ORCHARD), *arguments],
        cwd=directory,
        env={**env, "HOME": str(directory), "RAY_TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """here(*arguments): run the command in this process; return its exit status and what it has said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("HOME", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))

    def run(*arguments: str) -> tuple[int, str]:
        try:
            status = program.main(list(arguments))
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return status, capsys.readouterr().err

    return run


def shipped(directory: Path, port: int, **changes: str) -> None:
    text = SHIPPED_CONFIG.read_text().replace("port: 8000", f"port: {port}")
    for old, new in changes.items():
        text = text.replace(old, new)
    (directory / "serve_config.yaml").write_text(text)


def test_shipped_config_passes_the_check_and_is_shown(tmp_path: Path):
    shipped(tmp_path, 8000)
    done = orchard(tmp_path, "serve", "--check")
    assert done.returncode == 0, done.stderr
    assert "http          127.0.0.1:8000, this machine only, no keys" in done.stderr
    assert "spec_prefill  on: draft_model demo" in done.stderr
    assert "not in effect" not in done.stderr


def test_model_of_the_command_line_replaces_that_of_the_file(tmp_path: Path, here: Here):
    shipped(tmp_path, 8000)
    status, said = here("serve", "a/b", "--check")
    assert status == 0, said
    assert "model a/b" in " ".join(said.split())
    status, said = here("serve", "", "--check")
    assert status == 1 and "args.engine.model: " in said


def test_without_a_file_a_name_is_enough(here: Here):
    status, said = here("serve", "a/b", "--port", "8123", "--check")
    assert status == 0, said
    shown = " ".join(said.split())
    assert "file the defaults" in shown and "http 127.0.0.1:8123, this machine only, no keys" in shown
    assert "model a/b, served as 'a/b'" in shown
    status, said = here("serve", "--port", "99999", "--check")
    assert status == 1
    assert "the defaults is invalid:\n  http_options.port: expected a number from 1 to 65535, found 99999" in said
    shown = " ".join(here("serve", "--check")[1].split())
    assert "model demo, served as 'demo'" in shown and "a toy" in shown and "spec_prefill on: draft_model demo" in shown


def test_the_defaults_are_those_of_the_shipped_file():
    shipped = read_config(SHIPPED_CONFIG, "x")
    assert shipped is not None and default_config("x").raw == shipped.raw


def test_a_file_in_the_place_of_the_model_is_an_error_that_names_the_option(tmp_path: Path, here: Here):
    shipped(tmp_path, 8000)
    status, said = here("serve", "serve_config.yaml")
    assert status == 2 and "orchard serve --config serve_config.yaml" in said


def test_missing_or_invalid_config_file_ends_with_status_1_and_no_traceback(tmp_path: Path, here: Here):
    status, said = here("serve", "--config", "serve_config.yaml")
    assert status == 1 and "serve_config.yaml is invalid:\n  the file cannot be read" in said
    shipped(tmp_path, 8000, http_options="http_option")
    done = orchard(tmp_path, "serve")
    assert done.returncode == 1
    assert "  http_option: unknown key" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "other.yaml").write_text("applications: [{import_path: 'a:b'}]")
    status, said = here("serve", "--config", "other.yaml")
    assert status == 1 and "applications: none is Orchard" in said


def test_world_readable_key_file_ends_with_status_1_before_ray_is_imported(tmp_path: Path, here: Here):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{hash: 'sha256:{'0f' * 32}', name: ann}}\n")
    keys.chmod(0o644)
    shipped(tmp_path, free_port(), **{"      # http:\n": f"      http: {{api_keys_file: {keys}}}\n"})
    done = orchard(tmp_path, "serve")
    assert done.returncode == 1 and "Ray is up" not in done.stderr and "Traceback" not in done.stderr
    assert f"args.http.api_keys_file: {keys} has the mode 0644" in done.stderr
    status, said = here("serve", "--check")
    assert status == 1 and f"args.http.api_keys_file: {keys} has the mode 0644" in said
    keys.chmod(0o600)
    assert f"this machine only, keys of {keys}" in here("serve", "--check")[1]


def test_a_port_in_use_ends_with_status_1_and_the_pid_before_ray_is_imported(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shipped(tmp_path, port)
        done = orchard(tmp_path, "serve")
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use by process {os.getpid()} (" in done.stderr
    assert "Ray is up" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["serve", "--object-store-mib", "3"], ["nosuch"]])
def test_invalid_command_line_prints_the_usage(here: Here, arguments: list[str]):
    status, said = here(*arguments)
    assert status == 2 and said.startswith("usage: orchard")


def test_check_command_imports_neither_ray_nor_compute_libraries(tmp_path: Path):
    shipped(tmp_path, free_port())
    code = (
        "import sys; from deployments.serve_run.cli import main; main(['serve', '--check']); "
        "print({'ray', 'mlx', 'transformers', 'PIL', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_check_reports_what_a_model_can_do_here(tmp_path: Path):
    done = orchard(tmp_path, "check", "demo", "--draft-model", "demo")
    assert done.returncode == 0, done.stderr
    assert "qwen3_5: can be served" in done.stdout and "longest context" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    some_at_night([["check"], ["self-test", "--quick", "--model"]], [["check"]], "both find a model by one function"),
)
def test_commands_on_a_missing_model_say_why(tmp_path: Path, arguments: list[str]):
    done = orchard(tmp_path, *arguments, str(tmp_path / "nowhere"))
    assert done.returncode == 1 and "there is no directory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interface", "lo"], "--interface has no effect without --cluster"),
        (["--new-cluster"], "--new-cluster has no effect without --cluster"),
        (["--adopt"], "--adopt has no effect without --cluster"),
        (["--cluster", "--force"], "--force has no effect without --adopt"),
        (["--cluster", "--adopt", "--new-cluster"], "--new-cluster contradicts --adopt"),
        (["--cluster", "--adopt", "--interface", "lo"], "--interface contradicts --adopt"),
        (["--cluster", "--address", "10.0.0.1:6379"], "--address, or RAY_ADDRESS, names another one: 10.0.0.1:6379"),
    ],
)
def test_options_of_a_cluster_that_would_have_no_effect_are_refused(here: Here, arguments: list[str], message: str):
    status, said = here("serve", *arguments)
    assert status == 2 and message in " ".join(said.split())


def test_a_head_needs_an_address_of_this_machine(tmp_path: Path):
    done = orchard(tmp_path, "serve", "demo", "--port", str(free_port()), "--cluster", "--interface", "none0")
    assert done.returncode == 1 and "--interface is 'none0'; this machine has" in done.stderr
