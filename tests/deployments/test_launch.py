import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import launch


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr(launch.os, "environ", environ)
    return environ


def test_what_the_operator_has_set_wins(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["python"])
    environ["RAY_health_check_period_ms"] = "7"
    launch.prepare()
    assert environ.pop("RAY_health_check_period_ms") == "7"
    assert environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert "RAY_OVERRIDE_RESOURCES" not in environ
    assert launch.RAY_INIT_HOOK not in environ


@pytest.mark.parametrize("platform, is_set", [("darwin", True), ("linux", False)])
def test_macs_may_form_a_cluster(environ: dict, monkeypatch: pytest.MonkeyPatch, platform: str, is_set: bool):
    monkeypatch.setattr(sys, "platform", platform)
    launch.prepare()
    assert ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in environ) is is_set


@pytest.mark.parametrize(
    "argv, config",
    [
        (["/x/.venv/bin/serve", "run", "serve_config.yaml"], "serve_config.yaml"),
        (["serve", "run", "--address", "auto", "a.yml", "--non-blocking"], "a.yml"),
        (["serve", "run", "deployments.app:build_app"], None),
        (["serve", "deploy", "serve_config.yaml"], None),
        (["server", "run", "serve_config.yaml"], None),
        (["serve", "run"], None),
        (["python"], None),
        ([], None),
    ],
)
def test_serve_run_with_a_config_file_is_recognised(argv: list[str], config: str | None):
    assert launch.serve_run_config(argv) == config


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, {"mlx": 1, "mlx_scorer": 1}),
        ('{"tpu": 2}', {"tpu": 2, "mlx": 1, "mlx_scorer": 1}),
        ('{"mlx": 3}', {"mlx": 3, "mlx_scorer": 1}),
        ('{"mlx_scorer": 0}', {"mlx": 1, "mlx_scorer": 0}),
    ],
)
def test_serve_run_offers_what_engine_and_scorer_are_placed_by(
    environ: dict, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: dict
):
    monkeypatch.setattr(sys, "argv", ["serve", "run", "serve_config.yaml"])
    if given is not None:
        environ["RAY_OVERRIDE_RESOURCES"] = given
    launch.prepare()
    assert json.loads(environ["RAY_OVERRIDE_RESOURCES"]) == expected
    assert environ[launch.RAY_INIT_HOOK] == "deployments.launch_watch.watch_serve_run"


@pytest.mark.parametrize("given", ["[1]", "{", "null", "1"])
def test_resources_that_are_no_object_are_left_for_ray_to_refuse(
    environ: dict, monkeypatch: pytest.MonkeyPatch, given: str
):
    monkeypatch.setattr(sys, "argv", ["serve", "run", "serve_config.yaml"])
    environ["RAY_OVERRIDE_RESOURCES"] = given
    launch.prepare()
    assert environ["RAY_OVERRIDE_RESOURCES"] == given


def test_every_python_of_this_environment_is_prepared_and_nothing_heavy_is_imported(tmp_path: Path):
    code = "import os, sys; print(os.environ['RAY_SERVE_PROXY_USE_GRPC'], {'ray', 'numpy', 'mlx'} & set(sys.modules))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    output = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (output.stdout, output.stderr) == ("1 set()\n", "")
