"""What a head refuses before it starts anything, on loopback."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.args import AppArgs
from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.headship import Headship, write_headship
from deployments.cluster.join_token import read_join_token
from deployments.cluster.membership import write_membership
from deployments.cluster.ray_node import contradiction_in
from deployments.serve_run import head
from deployments.serve_run.checks import CannotStart
from deployments.serve_run.config_file import OrchardConfig, default_config
from deployments.serve_run.head import Head, HeadOptions, models_of_a_node

LOOPBACK = HeadOptions(interface="127.0.0.1")
VARIABLES = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_USE_TLS")
TLS_VARIABLES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a head sets for the processes that it starts."""
    with monkeypatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", *TLS_VARIABLES):
            patch.setenv(name, "token")
        for name in ("RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_raylet_start_wait_time_s"):
            patch.setenv(name, "60")
        for name in ports.VARIABLES:
            patch.setenv(name, "7")
        for name in VARIABLES:
            patch.setenv(name, "")  # what a head sets is undone
            patch.delenv(name)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    monkeypatch.setattr(head, "LEFTOVER_S", 0.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "GCS", probe.getsockname()[1])
    return ClusterFolder(tmp_path / "cluster")


def make(folder: ClusterFolder, config: OrchardConfig | None = None, options: HeadOptions = LOOPBACK) -> Head:
    return Head(
        config or default_config("demo", None), options, dashboard=False, object_store_bytes=2**27, folder=folder
    )


def released(made: Head) -> Head:
    """Release what a head has reserved, and what it has set for the processes that it would start."""
    made._lock.release()
    os.environ.pop("RAY_USE_TLS", None)
    return made


def test_a_head_makes_its_folder_and_says_how_to_join(folder: ClusterFolder):
    made = released(make(folder))
    assert made.address == f"127.0.0.1:{ports.GCS}"
    assert "orchard join 127.0.0.1 --token TOKEN" in made.describe()
    token = str(read_join_token(folder))
    assert token not in made.describe() and str(folder.join_token) in made.describe(), "no terminal reads it"


def test_a_node_loads_the_head_beside_its_model_unless_it_drafts_with_others_or_not_at_all(tmp_path: Path):
    model, beside = tmp_path / "model", tmp_path / "model-assistant"
    model.mkdir()

    def names(**engine: object) -> list[str]:
        args = AppArgs.model_validate({"engine": {"model": str(model), **engine}, "spec_prefill": {"enabled": False}})
        return [name for name, _ in models_of_a_node(args)]

    assert names() == [str(model)]
    beside.mkdir()
    assert names() == names(mtp_head="own") == [str(model), str(beside)]
    assert names(mtp_head="/else") == [str(model), "/else"]
    assert names(mtp_head=["/else", "own"]) == [str(model), "/else", str(beside)]
    assert names(mtp="off") == [str(model)]


def test_one_process_is_the_head(folder: ClusterFolder):
    first = make(folder)
    with pytest.raises(CannotStart, match="already the head of a cluster, by process"):
        make(folder)
    released(first)


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_contradict_a_cluster_are_named(name: str):
    assert f"{name} is set" in str(contradiction_in({name: "something"}))
    assert "RAY_AUTH_MODE is 'disabled'" in str(contradiction_in({"RAY_AUTH_MODE": "disabled"}))
    assert contradiction_in({"RAY_AUTH_MODE": "token"}) is None


def test_a_port_in_use_is_named(folder: ClusterFolder):
    with socket.create_server(("127.0.0.1", ports.GCS)), pytest.raises(CannotStart, match=f"port {ports.GCS} of 127"):
        make(folder)


def test_a_cluster_keeps_its_address(folder: ClusterFolder):
    released(make(folder))
    folder.store_log.write_bytes(b"")
    folder.note_started({"address": "192.168.1.10"})
    with pytest.raises(CannotStart, match=r"has its head at 192.168.1.10, .* and this machine's address is 127.0.0.1"):
        make(folder)


def test_options_that_a_running_serve_keeps_are_refused_until_a_new_cluster(folder: ClusterFolder):
    first = released(make(folder))
    secrets = folder.token(), folder.tls.authority.read_text()
    folder.store_log.write_bytes(b"")
    first._note()
    changed = default_config("demo", 8124)
    with pytest.raises(CannotStart, match=r"http_options: .*8000.* there, .*8124.* here.*--new-cluster"):
        make(folder, changed)
    new = released(make(folder, changed, HeadOptions("127.0.0.1", is_new=True)))
    assert not folder.store_log.exists()
    assert (folder.token(), folder.tls.authority.read_text()) != secrets, "earlier members know nothing of it"
    assert new.describe() == first.describe()


def test_a_machine_that_has_left_a_cluster_is_the_head_of_its_own_with_secrets_of_its_own(folder: ClusterFolder):
    released(make(folder))
    secrets = folder.token(), folder.tls.authority.read_text()
    folder.tls.authority_key.unlink()  # as on a member
    released(make(folder))
    assert (folder.token(), folder.tls.authority.read_text()) != secrets and folder.tls.authority_key.exists()


@pytest.mark.parametrize(
    ("had", "has", "remedy"), [(True, False, "Leave --no-tls out"), (False, True, "Give --no-tls")]
)
def test_a_cluster_keeps_its_tls(folder: ClusterFolder, had: bool, has: bool, remedy: str):
    first = released(make(folder, options=HeadOptions("127.0.0.1", has_tls=had)))
    assert folder.tls.certificate.exists() == had == ("--no-tls" not in first.describe())
    folder.store_log.write_bytes(b"")
    first._note()
    with pytest.raises(CannotStart, match=f"{remedy}, or start a new cluster with --new-cluster"):
        make(folder, options=HeadOptions("127.0.0.1", has_tls=has))
    released(make(folder, options=HeadOptions("127.0.0.1", has_tls=had)))


def test_the_application_goes_on_only_if_it_is_the_same(folder: ClusterFolder):
    made = released(make(folder))
    assert not made.continues({"args": 1})
    folder.store_log.write_bytes(b"")
    made.note_deployed({"args": 1})
    again = released(make(folder))
    assert again.continues({"args": 1}) and not again.continues({"args": 2})


def test_a_member_is_no_head_of_another_cluster_and_is_told_how_to_adopt_its_own(folder: ClusterFolder):
    folder.make()
    write_membership(folder, os.getpid(), "192.168.1.10", "http://127.0.0.1:8000")
    with pytest.raises(CannotStart, match=r"belongs to the cluster of 192.168.1.10: run `orchard leave` .*--adopt"):
        make(folder)


def test_a_head_that_was_replaced_refuses_to_start(folder: ClusterFolder):
    first = released(make(folder))
    folder.store_log.write_bytes(b"")
    first._note(application=None)
    write_headship(folder, Headship("192.168.1.11", 2))
    with pytest.raises(CannotStart, match=r"192.168.1.11 has taken over the cluster .*orchard join 192.168.1.11"):
        make(folder)
    again = released(make(folder, options=HeadOptions("127.0.0.1", is_new=True)))
    assert again.headship == Headship("127.0.0.1", 1), "a new cluster"


def test_a_cluster_goes_on_with_other_sources_but_not_with_two_changes_at_once(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
):
    made = released(make(folder))
    folder.store_log.write_bytes(b"")
    made.note_deployed({"args": 1, "graph": 1})
    made.refuse_two_changes({"args": 2, "graph": 1})
    monkeypatch.setattr(head, "sources_digest", lambda: "of another commit")
    again = released(make(folder))
    assert again.continues({"args": 1, "graph": 1})
    again.refuse_two_changes({"args": 1, "graph": 1})
    with pytest.raises(CannotStart, match=r"runs another application \(graph\), and was started from other sources"):
        again.refuse_two_changes({"args": 1, "graph": 2})


def test_a_cluster_keeps_the_versions_of_python_and_ray(folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch):
    made = released(make(folder))
    folder.store_log.write_bytes(b"")
    made._note()
    released(make(folder))
    monkeypatch.setattr(head, "package_versions", lambda: {"ray": "9.9"})
    with pytest.raises(CannotStart, match=r"was started with Python .*, ray 2\..* this machine has .* ray 9\.9"):
        make(folder)
