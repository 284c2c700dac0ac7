"""Reasons that end the start: a Ray cluster that does not answer any more, keys that cannot be read, a GPU in use."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from deployments.args import AppArgs
from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.relay import GcsRelay
from deployments.serve_run import checks
from deployments.serve_run.checks import CannotStart, ModelCheck, check_keys, check_machine, finds_cluster
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.head_secrets import head_secrets
from engine.device_lock import _name
from engine.process_lock import ProcessLock, lock_path
from engine.processing.checkpoint import DEMO_MODEL
from tests.e2e.server import free_port


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """None of Ray's processes runs, as far as the checks can see: other tests may have some."""
    monkeypatch.setattr(checks, "RAY_PROCESSES", ())
    return tmp_path / "ray_current_cluster"


def test_missing_or_malformed_address_file_means_no_cluster(note: Path):
    assert not finds_cluster(note)
    note.write_text("nonsense")
    assert not finds_cluster(note)


def test_reachable_cluster_is_found_by_its_address_file(note: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as head:
        note.write_text(f"127.0.0.1:{head.getsockname()[1]}")
        assert finds_cluster(note)
    assert note.exists() and capsys.readouterr().err == ""


def test_a_relay_whose_head_does_not_answer_is_no_cluster(note: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_ray_process", lambda: 4711)
    relay = GcsRelay("127.0.0.1", 0, ("127.0.0.1", free_port()))
    note.write_text(f"127.0.0.1:{relay.port}")
    with pytest.raises(CannotStart, match=r"does not answer \(its head does not answer\), but process 4711 of Ray"):
        finds_cluster(note)
    relay.stop()


def test_a_relay_with_tls_whose_head_does_not_answer_is_no_cluster(
    note: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(checks, "_ray_process", lambda: 4711)
    folder = ClusterFolder(tmp_path / ".orchard" / "cluster")
    folder.make()
    tls = head_secrets(folder, "127.0.0.1", has_tls=True).tls
    monkeypatch.setattr(checks, "ClusterFolder", lambda: folder)
    relay = GcsRelay("127.0.0.1", 0, ("127.0.0.1", free_port()), tls)
    monkeypatch.setattr(ports, "RELAY", relay.port)
    note.write_text(f"127.0.0.1:{relay.port}")
    with pytest.raises(CannotStart, match=r"does not answer \(its head does not answer\), but process 4711 of Ray"):
        finds_cluster(note)
    relay.stop()


def test_address_file_of_a_killed_local_cluster_is_removed(note: Path, capsys: pytest.CaptureFixture[str]):
    note.write_text(address := f"127.0.0.1:{free_port()}")
    assert not finds_cluster(note)
    assert not note.exists() and address in capsys.readouterr().err


def test_unreachable_remote_head_is_an_error_and_keeps_its_address_file(note: Path, monkeypatch: pytest.MonkeyPatch):
    """Starting without it would leave a second service on this machine when the head is back."""
    monkeypatch.setattr(checks, "CONNECT_S", 0.1)
    note.write_text("192.0.2.77:6379")
    with pytest.raises(CannotStart, match=r"belongs to the Ray cluster at 192\.0\.2\.77:6379 .*`ray stop`"):
        finds_cluster(note)
    assert note.exists()


def test_address_file_is_kept_while_a_process_of_the_local_cluster_runs(note: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_ray_process", lambda: 4711)
    note.write_text(f"127.0.0.1:{free_port()}")
    with pytest.raises(CannotStart, match="process 4711 of Ray is still running"):
        finds_cluster(note)
    assert note.exists()


def test_unreadable_api_keys_end_the_start_with_their_config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def check(**http: str) -> None:
        check_keys(OrchardConfig({}, {}, AppArgs.model_validate({"http": http})))

    check()
    with pytest.raises(CannotStart, match=r"^args\.http\.api_keys_file: /.*/keys\.yaml does not exist"):
        check(api_keys_file=str(tmp_path / "keys.yaml"))
    monkeypatch.delenv("ORCHARD_TEST_KEYS", raising=False)
    with pytest.raises(CannotStart, match=r"^args\.http\.api_keys_env: .* ORCHARD_TEST_KEYS is not set"):
        check(api_keys_env="ORCHARD_TEST_KEYS")
    monkeypatch.setenv("ORCHARD_TEST_KEYS", "a,b")
    check(api_keys_env="ORCHARD_TEST_KEYS")


def test_a_gpu_in_use_ends_the_start_before_the_port_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lock = ProcessLock(lock_path(_name("metal")))
    port = free_port()
    raw = {"http_options": {"host": "127.0.0.1", "port": port}}
    with pytest.raises(CannotStart, match="metal GPU is in use by an engine in process"):
        check_machine(OrchardConfig(raw, {}, AppArgs()))
    lock.release()
    check_machine(OrchardConfig(raw, {}, AppArgs()))


def asked(engine: dict[str, Any]) -> OrchardConfig:
    return OrchardConfig({}, {}, AppArgs.model_validate({"engine": engine}))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", None, "config.json: the file is missing"),
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "{}", "config.json: vocab_size is missing or not a positive integer"),
        ("model.safetensors", None, "there are no weights (*.safetensors)"),
    ],
)
def test_broken_checkpoint_ends_the_start_before_any_process_begins(
    tmp_path: Path, name: str, content: str | None, reason: str
):
    model = Path(shutil.copytree(DEMO_MODEL / "draft", tmp_path / "model"))
    (model / name).unlink() if content is None else (model / name).write_text(content)
    with pytest.raises(CannotStart, match=re.escape(reason)) as error:
        ModelCheck(asked({"model": str(model)}))
    assert str(model) in str(error.value) or "config.json" in str(error.value)


def test_missing_directory_ends_the_start_with_its_path(tmp_path: Path):
    with pytest.raises(CannotStart, match=f"there is no directory {tmp_path}/nowhere"):
        ModelCheck(asked({"model": f"{tmp_path}/nowhere"}))


def test_model_that_the_library_does_not_implement_ends_the_start(tmp_path: Path):
    """As the engine finds it, in a process of its own; the reasons: tests/engine/worker/test_model_report.py."""
    model = Path(shutil.copytree(DEMO_MODEL / "draft", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    with pytest.raises(CannotStart, match=r"start: models of the family nosuch \(.*/model\) cannot be served: mlx-vlm"):
        ModelCheck(asked({"model": str(model)})).wait()


def test_check_that_ends_in_another_way_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    ModelCheck(asked({})).wait()
    assert "The model could not be checked before the start" in capsys.readouterr().err
