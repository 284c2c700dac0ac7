import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments import app, ray_internals
from deployments.app import (
    ENGINE_SHARE,
    MAX_NODES,
    NO_LIMIT,
    SCORER_SHARE,
    SMALL_SHARE,
    AppArgs,
    build_app,
    build_graph,
)
from deployments.args import DRAIN_TIMEOUT_S
from deployments.dispatch.engine_client import PLAN_TIMEOUT_S
from deployments.ingress import plan_timeout_s
from engine.errors import EngineFailed
from engine.gpus import MAX_ENGINES
from engine.processing.checkpoint import DEMO_MODEL
from engine.spec_prefill_config import SpecPrefillConfig
from tests.e2e.server import SHIPPED_CONFIG

SHIPPED = AppArgs(spec_prefill=SpecPrefillConfig(enabled=True))


def fake_cluster(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], here: str = "a", scorers: tuple[str, ...] = ()
) -> None:
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app, "nodes_offering", {"mlx": nodes, "mlx_scorer": list(scorers)}.__getitem__)
    monkeypatch.setattr(app, "engines_by_node", lambda here: dict.fromkeys(nodes, 1) or {"head": here})
    monkeypatch.setattr(app, "offers_nothing", lambda: not (nodes or scorers))
    monkeypatch.setattr(app, "num_living_nodes", lambda: len({*nodes, *scorers, here}))
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
        ({"spec_prefill": {"keep": 0.05}}, "spec_prefill.keep"),
        ({"spec_prefill": {"treshold_tokens": 1}}, "spec_prefill.treshold_tokens"),
        ({"http": {"system_policy": "ignore"}}, "http.system_policy"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"drain_timeout_s": 3601}, "drain_timeout_s"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s"),
    ],
)
def test_unknown_key_or_invalid_value_is_refused_by_name(args: dict[str, Any], key: str):
    with pytest.raises(ValidationError) as error:
        AppArgs.model_validate(args)
    assert [".".join(map(str, e["loc"])) for e in error.value.errors()] == [key]


def test_another_version_of_ray_is_refused_when_the_app_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_internals, "RAY_VERSION", "2.59.0")
    with pytest.raises(EngineFailed, match=r"private names of Ray 2\.59\.0"):
        build_app(AppArgs())


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
    assert AppArgs.model_validate(application["args"]) == SHIPPED
    # Serve refuses options of deployments that are not in the graph, as SpecPrefillScorer may be
    assert {d["name"] for d in application["deployments"]} <= set(deployments_of(build_app(AppArgs())))


COMMENTED_OUT = re.compile(r"^( +)# ( *[a-z_]+:)", re.MULTILINE)


def test_commented_options_of_the_shipped_config_show_the_defaults():
    """deployments/OPTIONS.md lists all options: see serve_run/test_options_reference.py."""
    shown, num_shown = COMMENTED_OUT.subn(r"\1\2", SHIPPED_CONFIG.read_text())
    (application,) = yaml.safe_load(shown)["applications"]
    assert num_shown > 20
    assert AppArgs.model_validate(application["args"]) == SHIPPED


def test_each_deployment_has_at_most_one_replica_per_node(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b", "c"])
    deployments = deployments_of(build_app(AppArgs()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica"}
    shares = []
    for deployment in deployments.values():
        config = deployment._deployment_config
        assert config.autoscaling_config.initial_replicas == 3
        assert deployment._replica_config.max_replicas_per_node == (16 if deployment.name == "ModelReplica" else 1)
        shares.append(deployment.ray_actor_options["resources"]["mlx"])
    assert sorted(shares) == [SMALL_SHARE] * 3 + [ENGINE_SHARE]
    assert sum(shares) <= 1 < 2 * ENGINE_SHARE


def test_application_runs_only_with_an_image_planner_unless_the_model_reads_text_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    for here, model, waits_for in (
        ("a", "demo", None),
        ("a", str(DEMO_MODEL / "draft"), "ModelReplica"),
        ("head", "/models/on/the/nodes", None),
    ):
        fake_cluster(monkeypatch, ["a", "b"], here)
        args = AppArgs.model_validate({"engine": {"model": model}})
        autoscaling = deployments_of(build_app(args))["MLLM"]._deployment_config.autoscaling_config
        assert autoscaling.policy.policy_kwargs["waits_for"] == waits_for
        assert autoscaling.min_replicas == (waits_for is None)


def test_serve_limits_no_deployment_as_each_bounds_itself(monkeypatch: pytest.MonkeyPatch):
    deployments = deployments_of(build_app(scoring()))
    assert {one.max_ongoing_requests for one in deployments.values()} == {NO_LIMIT}
    autoscaling = deployments["Ingress"]._deployment_config.autoscaling_config
    assert autoscaling.max_replicas == MAX_NODES


def test_deployments_have_no_queue_limit_in_serve():
    for deployment in deployments_of(build_app(scoring())).values():
        assert deployment._deployment_config.max_queued_requests == -1, deployment.name


def test_shipped_config_does_not_override_options_derived_from_its_args():
    (application,) = yaml.safe_load(SHIPPED_CONFIG.read_text())["applications"]
    for deployment in application["deployments"]:
        assert set(deployment) <= {"name", "logging_config"}


def test_shutdown_timeouts_of_serve_are_longer_than_the_drain_timeout():
    for drain_timeout_s in (0, 25, 600):
        args = scoring().model_copy(update={"drain_timeout_s": drain_timeout_s})
        deployments = deployments_of(build_app(args))
        for deployment in deployments.values():
            assert deployment._deployment_config.graceful_shutdown_timeout_s >= drain_timeout_s + 10, deployment.name
        assert deployments["Ingress"].init_args[0].drain_timeout_s == drain_timeout_s
        engine = deployments["ModelReplica"]
        until_killed_s = engine._deployment_config.graceful_shutdown_timeout_s
        # the ingress has told the clients before the engine does, and Serve kills neither meanwhile
        assert drain_timeout_s + 2 < engine.init_args[1] < until_killed_s - 10
    assert AppArgs().drain_timeout_s == DRAIN_TIMEOUT_S


def scoring(**spec_prefill: Any) -> AppArgs:
    return AppArgs.model_validate({"spec_prefill": {"enabled": True, **spec_prefill}})


def test_scorer_deployment_places_a_replica_on_each_node_with_its_resource(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b", "c"], scorers=("c", "d"))
    deployments = deployments_of(build_app(scoring()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica", "SpecPrefillScorer"}
    scorer = deployments["SpecPrefillScorer"]
    assert scorer.ray_actor_options["resources"] == {"mlx_scorer": SCORER_SHARE}
    assert 2 * SCORER_SHARE > 1
    assert scorer._replica_config.max_replicas_per_node == 1
    engine = deployments["ModelReplica"]
    for deployment, num_nodes, resource, more in (
        (scorer, 0, "mlx_scorer", {"waits_for": "ModelReplica"}),
        (engine, 3, "mlx", {"waits_for": None, "num_without_resources": 1}),
    ):
        autoscaling = deployment._deployment_config.autoscaling_config
        assert autoscaling.initial_replicas == num_nodes
        assert autoscaling.policy.policy_kwargs == {"resource": resource, **more}
        assert autoscaling.policy.policy_function == "deployments.autoscaling:OnePerOfferingNode"


def test_plan_timeout_is_longer_than_the_scoring_deadline():
    arguments: Any = build_app(scoring(deadline_s=500))._bound_deployment.init_args
    assert arguments[5]._bound_deployment.name == "SpecPrefillScorer"
    assert plan_timeout_s(arguments[0]) >= 560


def test_plan_timeout_without_a_scorer_is_the_default():
    arguments: Any = build_app(AppArgs())._bound_deployment.init_args
    assert plan_timeout_s(arguments[0]) == PLAN_TIMEOUT_S


def test_missing_scorer_resource_is_refused_with_instructions(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a"])
    reason = refusal(scoring())
    assert """ray start --resources='{"mlx": 1, "mlx_scorer": 1}'""" in reason
    assert "spec_prefill.enabled: false" in reason
    build_app(AppArgs())


def test_missing_draft_model_or_draft_with_own_code_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a"], scorers=("a",))
    build_app(scoring())
    assert "no-such-draft" in refusal(scoring(draft_model="./no-such-draft"))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "code.py"}}')
    assert "auto_map" in refusal(scoring(draft_model=str(tmp_path)))
    fake_cluster(monkeypatch, ["a"], scorers=("b",))
    build_app(scoring(draft_model=str(tmp_path)))


def test_default_draft_model_is_the_draft_of_the_demo_model():
    assert app._resolve_draft(SpecPrefillConfig()) == DEMO_MODEL / "draft"


def test_missing_mlx_resource_is_refused_with_instructions(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, [])
    with pytest.raises(EngineFailed, match=r"""ray start --resources='\{"mlx": 1\}'"""):
        build_app(AppArgs())


def test_missing_model_ends_the_start_on_a_node_that_holds_models(monkeypatch: pytest.MonkeyPatch):
    args = AppArgs.model_validate({"engine": {"model": "./no-such-model"}})
    fake_cluster(monkeypatch, ["a"])
    with pytest.raises(EngineFailed, match="no-such-model"):
        build_app(args)
    fake_cluster(monkeypatch, ["a"], here="a node that only routes")
    build_app(args)


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=81f2"


def pinning(*pinned: dict[str, Any], **http: Any) -> AppArgs:
    return AppArgs.model_validate({"engine": {"prefix_cache": {"pinned": pinned}}, "http": http})


def refusal(args: AppArgs) -> str:
    with pytest.raises(EngineFailed) as error:
        build_app(args)
    return str(error.value)


@pytest.mark.parametrize(
    ("system", "http", "line", "pattern"),
    [
        (f"You are helpful.\n{BILLING}\nBe brief.", {}, f"line 2 ('{BILLING}')", "x-anthropic-billing-header"),
        ("You are helpful.\r\nNow: 12:00\r\n", {"volatile_patterns": ["x$", "^now:", "^Now:"]}, "line 2", "'^Now:'"),
        ("You are helpful.\n\nBe brief.", {"volatile_patterns": ["^$"]}, "line 2 ('')", "'^$'"),
        ("You are helpful.\n\n", {"volatile_patterns": ["^$"]}, "line 2 ('')", "'^$'"),
    ],
)
def test_pinned_prompt_with_a_volatile_line_ends_the_start(system: str, http: dict[str, Any], line: str, pattern: str):
    reason = refusal(pinning({"system": "Be brief."}, {"system": system}, **http))
    assert "engine.prefix_cache.pinned[1]" in reason
    assert line in reason
    assert pattern in reason


def test_pinned_prompt_without_volatile_lines_is_accepted():
    build_app(pinning({"system": f"It is called {BILLING}"}))
    build_app(pinning({"system": BILLING}, volatile_patterns=[]))
    build_app(pinning({"system": "You are helpful.\n"}, volatile_patterns=["^$"], system_policy="error"))


def test_pinned_prompt_file_is_checked_only_on_nodes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    good, volatile, binary = tmp_path / "good.txt", tmp_path / "volatile.txt", tmp_path / "binary.txt"
    good.write_text("Du bist höflich.\n", encoding="utf-8")
    volatile.write_text(f"Du bist höflich.\n{BILLING}\n", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    build_app(pinning({"system_file": str(binary)}))  # without Ray
    fake_cluster(monkeypatch, ["a"])
    build_app(pinning({"system_file": str(good)}))
    assert "pinned[0]: line 2" in refusal(pinning({"system_file": str(volatile)}))
    for path in (binary, tmp_path / "none.txt", tmp_path):
        assert f"{path} cannot be read" in refusal(pinning({"system_file": str(good)}, {"system_file": str(path)}))
    fake_cluster(monkeypatch, ["a"], here="a node that only routes")
    build_app(pinning({"system_file": str(binary)}))
    assert "pinned[1]: line 1" in refusal(pinning({"system_file": str(binary)}, {"system": BILLING}))


def test_path_of_a_pinned_prompt_file_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt.txt").write_text(BILLING)
    fake_cluster(monkeypatch, ["a"])
    assert "pinned[0]: line 1" in refusal(pinning({"system_file": "~/prompt.txt"}))


def test_deployment_options_of_the_config_file_override_the_defaults():
    overrides = {"MLLM": {"max_ongoing_requests": 7}, "ModelReplica": {"health_check_period_s": 9}}
    deployments = deployments_of(build_graph(AppArgs(), overrides))
    assert deployments["MLLM"].max_ongoing_requests == 7
    assert deployments["TextMTP"].max_ongoing_requests == NO_LIMIT
    assert deployments["ModelReplica"]._deployment_config.health_check_period_s == 9
    scorer = deployments_of(build_graph(scoring(), {"SpecPrefillScorer": {"health_check_timeout_s": 4}}))
    assert scorer["SpecPrefillScorer"]._deployment_config.health_check_timeout_s == 4


def test_single_node_cluster_without_resources_gets_all_deployments_on_its_head(monkeypatch: pytest.MonkeyPatch):
    """As `serve run` starts it. Ray's own resource of the head is all that the replicas ask for."""
    nodes = [{"NodeID": "head", "Alive": True, "Resources": {"CPU": 2.0, "node:__internal_head__": 1.0}}]
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(app, "node_id", lambda: "head")
    deployments = deployments_of(build_app(scoring()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica", "SpecPrefillScorer"}
    for name, deployment in deployments.items():
        assert deployment.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}
        assert deployment._replica_config.max_replicas_per_node == 1
        starts_late = name == "SpecPrefillScorer"
        assert deployment._deployment_config.autoscaling_config.initial_replicas == (0 if starts_late else 1)


def test_only_node_of_a_cluster_without_resources_has_as_many_engines_as_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    nodes = [{"NodeID": "head", "Alive": True, "Resources": {"CPU": 2.0, "node:__internal_head__": 1.0}}]
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(app, "node_id", lambda: "head")
    deployments = deployments_of(build_app(AppArgs(engines_per_node=3)))
    for name, deployment in deployments.items():
        num = 3 if name == "ModelReplica" else 1
        assert deployment._replica_config.max_replicas_per_node == num
        assert deployment._deployment_config.autoscaling_config.initial_replicas == num
    assert deployments["ModelReplica"].init_args[-1] == deployments["Ingress"].init_args[-1] == 3


def test_nodes_that_offer_another_number_of_engines_than_is_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b"])
    build_app(AppArgs(engines_per_node=1))
    monkeypatch.setattr(app, "engines_by_node", lambda here: {"a": 2, "b": 4})
    build_app(AppArgs())
    reason = refusal(AppArgs(engines_per_node=2))
    assert "engines_per_node is 2, but node b offers 4 of the resource 'mlx'" in reason
    assert """ray start --resources='{"mlx": 2}'""" in reason


@pytest.mark.parametrize("num", range(1, MAX_ENGINES + 1))
def test_node_fits_as_many_engines_as_it_offers_of_the_resource(num: int):
    assert num * ENGINE_SHARE + 3 * SMALL_SHARE <= num < (num + 1) * ENGINE_SHARE


def test_cluster_of_several_nodes_without_the_mlx_resource_is_refused(monkeypatch: pytest.MonkeyPatch):
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}} for name in "ab"]
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    assert "No node of this Ray cluster offers the resource 'mlx'" in refusal(AppArgs())


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_cluster_of_several_nodes_without_token_authentication_is_refused(
    monkeypatch: pytest.MonkeyPatch, mode: str | None
):
    monkeypatch.delenv("RAY_AUTH_MODE")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    fake_cluster(monkeypatch, ["a", "b"])
    assert "RAY_AUTH_MODE is not `token`" in refusal(AppArgs())
    fake_cluster(monkeypatch, ["a"])
    build_app(AppArgs())


def test_grpc_message_limit_has_a_default_large_enough_for_plans_with_images(monkeypatch: pytest.MonkeyPatch):
    name = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    for value, expected in ((None, str(64 * 2**20)), ("99", "99")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        for deployment in deployments_of(build_app(AppArgs())).values():
            assert deployment.ray_actor_options["runtime_env"]["env_vars"][name] == expected


@pytest.mark.parametrize("platform, expected", [("darwin", "0"), ("linux", None)])
def test_replicas_of_a_mac_start_subprocesses_without_the_fork_handlers_of_grpc(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: str | None
):
    monkeypatch.setattr("sys.platform", platform)
    for deployment in deployments_of(build_app(AppArgs())).values():
        variables = deployment.ray_actor_options["runtime_env"]["env_vars"]
        assert variables.get("GRPC_ENABLE_FORK_SUPPORT") == expected


def test_variable_not_in_effect_is_printed_and_part_of_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    build_app(AppArgs())
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RAY_worker_niceness")
    arguments: Any = build_app(AppArgs())._bound_deployment.init_args
    shown = capsys.readouterr().err
    assert "RAY_worker_niceness=0 is not in effect: engine, ingress and proxies run at nice 15" in shown
    assert "not checked: only `orchard serve`, and `serve run` if orchard_launch.pth is in effect, read" in shown
    effective = arguments[1]["effective"]
    assert effective["spec_prefill"] == "off: spec_prefill.enabled is false"
    assert [line.partition("=")[0] for line in effective["environment"]] == ["RAY_worker_niceness"]


def test_other_model_without_its_own_draft_is_served_without_sparse_prefill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    model = Path(shutil.copytree(DEMO_MODEL / "draft", tmp_path / "model"))
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    args = AppArgs.model_validate({"engine": {"model": str(model)}, "spec_prefill": {"enabled": True}})
    fake_cluster(monkeypatch, ["a"])
    graph = build_app(args)
    deployments = deployments_of(graph)
    assert "SpecPrefillScorer" not in deployments
    assert deployments["TextMTP"].init_args[0].spec_prefill.enabled is False
    arguments: Any = graph._bound_deployment.init_args
    assert arguments[1]["effective"]["spec_prefill"] == f"off: no draft_model is set for {model}"
