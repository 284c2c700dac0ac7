from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments import app
from deployments.app import ENGINE_SHARE, SMALL_SHARE, AppArgs, build_app
from engine.protocol import EngineFailed
from tests.e2e.server import SHIPPED_CONFIG


def fake_cluster(monkeypatch: pytest.MonkeyPatch, nodes: list[str], here: str = "a") -> None:
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app, "mlx_node_ids", lambda: nodes)
    monkeypatch.setattr(app, "node_id", lambda: here)


def deployments_of(application: Any) -> dict[str, Any]:
    """Name -> deployment, of the ingress and all that are bound to it."""
    bound = application._bound_deployment
    found = {bound.name: bound}
    for argument in bound.init_args:
        if hasattr(argument, "_bound_deployment"):
            found |= deployments_of(argument)
    return found


@pytest.mark.parametrize(
    "args, key",
    [
        ({"engin": {}}, "engin"),
        ({"engine": {"max_runing": 3}}, "engine.max_runing"),
        ({"engine": {"dtype": "int4"}}, "engine.dtype"),
        ({"media": {"max_images": 0}}, "media.max_images"),
        ({"http": {"system_policy": "ignore"}}, "http.system_policy"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(args: dict[str, Any], key: str):
    with pytest.raises(ValidationError) as error:
        AppArgs.model_validate(args)
    assert [".".join(map(str, e["loc"])) for e in error.value.errors()] == [key]


@pytest.mark.parametrize(
    "args, name",
    [
        ({}, "demo"),
        ({"engine": {"model": "org/model"}}, "org/model"),
        ({"engine": {"model": "org/model"}, "served_model_name": "mine"}, "mine"),
    ],
)
def test_the_model_is_served_under_its_name(args: dict[str, Any], name: str):
    assert AppArgs.model_validate(args).model_name == name


def test_a_directory_is_served_under_its_last_component(tmp_path: Any):
    (tmp_path / "Some-Model").mkdir()
    assert AppArgs.model_validate({"engine": {"model": f"{tmp_path}/Some-Model/"}}).model_name == "Some-Model"


def test_the_shipped_config_names_our_app_with_valid_arguments():
    (application,) = yaml.safe_load(SHIPPED_CONFIG.read_text())["applications"]
    assert application["import_path"] == "deployments.app:build_app"
    assert AppArgs.model_validate(application["args"]) == AppArgs()
    assert {d["name"] for d in application["deployments"]} == set(deployments_of(build_app(AppArgs())))


def test_there_is_one_of_each_per_node(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b", "c"])
    deployments = deployments_of(build_app(AppArgs()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica"}
    shares = []
    for deployment in deployments.values():
        config = deployment._deployment_config
        assert config.autoscaling_config.initial_replicas == 3
        assert deployment._replica_config.max_replicas_per_node == 1
        shares.append(deployment.ray_actor_options["resources"]["mlx"])
    assert sorted(shares) == [SMALL_SHARE] * 3 + [ENGINE_SHARE]
    assert sum(shares) <= 1 < 2 * ENGINE_SHARE


def test_the_engine_rather_than_serve_says_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a"])
    args = AppArgs.model_validate({"engine": {"max_running": 3, "max_waiting": 5}})
    assert deployments_of(build_app(args))["ModelReplica"].max_ongoing_requests > 8


def test_a_cluster_without_mlx_is_told_how_to_offer_it(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, [])
    with pytest.raises(EngineFailed, match=r"""ray start --resources='\{"mlx": 1\}'"""):
        build_app(AppArgs())


def test_a_missing_model_is_found_out_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    args = AppArgs.model_validate({"engine": {"model": "./no-such-model"}})
    fake_cluster(monkeypatch, ["a"])
    with pytest.raises(EngineFailed, match="no-such-model"):
        build_app(args)
    fake_cluster(monkeypatch, ["a"], here="a node that only routes")
    build_app(args)
