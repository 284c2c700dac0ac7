import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from deployments import launch_watch
from deployments.launch_watch import (
    _welcome,
    complaints_about,
    drain_timeouts_s,
    forget_dead_cluster,
    reason_in,
    watch_serve_run,
)


def config(**args: Any) -> dict[str, Any]:
    return {"applications": [{"name": "orchard", "import_path": "deployments.app:build_app", "args": args}]}


def test_a_right_config_is_silent():
    assert complaints_about(config()) == []
    assert complaints_about(config(engine={"model": "demo", "max_running": 4}, media={"max_images": 2})) == []


def test_each_wrong_key_is_named_with_its_value():
    complaints = complaints_about(config(engine={"modle": "demo", "max_running": "many"}, servd_model_name="x"))
    assert [line.strip().split(":")[0] for line in complaints] == [
        "args.engine.max_running",
        "args.engine.modle",
        "args.servd_model_name",
    ]
    assert "'many'" in complaints[0]


def test_applications_of_others_are_none_of_our_business():
    assert complaints_about({"applications": [{"import_path": "somebody.else:app", "args": {"x": 1}}]}) == []


def test_the_time_that_running_answers_get_is_that_of_each_application_of_ours():
    two = config(drain_timeout_s=3)["applications"] + [{"import_path": "deployments.app:build_app"}]
    others = [{"name": "other", "import_path": "somebody.else:app", "args": {"drain_timeout_s": 9}}]
    assert drain_timeouts_s({"applications": two + others}) == {"orchard": 3, "default": 25}


@pytest.mark.parametrize("import_path", ["deployments.app:build_app", "somebody.else:app"])
def test_signals_are_ours_only_where_an_application_is(
    import_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "serve_config.yaml"
    path.write_text(f"applications: [{{name: x, import_path: '{import_path}'}}]")
    monkeypatch.setattr("sys.argv", ["/bin/serve", "run", str(path)])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(launch_watch, "_watch", lambda config, on_running: None)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        watch_serve_run(None)
        changed = [signal.getsignal(signum) is not handler for signum, handler in before.items()]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert changed == [import_path == launch_watch.OUR_APP] * 2


def test_the_note_of_a_cluster_that_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    note = tmp_path / "ray_current_cluster"
    monkeypatch.setattr("ray._common.utils.get_ray_address_file", lambda temp_dir: str(note))
    forget_dead_cluster()  # no note: nothing to do
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        note.write_text(address)
        forget_dead_cluster()
        assert note.read_text() == address
    assert capsys.readouterr().err == ""
    forget_dead_cluster()
    assert not note.exists()
    assert address in capsys.readouterr().err


TRACEBACK = """Deploying app 'orchard' failed with exception:
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
  File "b.py", line 2, in g
    raise EngineFailed("no")
{error}
"""


@pytest.mark.parametrize(
    "error",
    [
        "engine.protocol.EngineFailed: model './nope': there is no directory",
        "pydantic.ValidationError: 1 validation error for AppArgs\nengine.modle\n  Extra inputs are not permitted",
    ],
)
def test_the_reason_is_the_end_of_the_traceback(error: str):
    assert reason_in(TRACEBACK.format(error=error)) == error


def test_a_message_without_a_traceback_is_its_own_reason():
    assert reason_in("Deployment Ingres does not exist.\n") == "Deployment Ingres does not exist."
    assert reason_in("") == ""


@pytest.mark.parametrize(
    "http_options, application, expected",
    [
        ({}, {}, "http://127.0.0.1:8000/v1 (model demo)"),
        ({"host": "0.0.0.0", "port": 9}, {"route_prefix": "/a"}, "http://127.0.0.1:9/a/v1 (model demo)"),
        ({"host": "10.0.0.1"}, {"args": {"engine": {"model": "o/m"}}}, "http://10.0.0.1:8000/v1 (model o/m)"),
    ],
)
def test_the_welcome_tells_url_and_model(http_options: dict, application: dict, expected: str):
    whole = {"http_options": http_options, "applications": [{"name": "orchard", **application}]}
    assert _welcome(whole, "orchard") == f"Orchard is ready: {expected}"
