import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.request_router import RequestRouter

from deployments import app
from deployments.app import (
    ENGINE_SHARE,
    MAX_NODES,
    MAX_PLANNING,
    SCORER_SHARE,
    SMALL_SHARE,
    AppArgs,
    build_app,
    build_graph,
)
from deployments.args import DRAIN_TIMEOUT_S
from deployments.engine_client import PLAN_TIMEOUT_S
from engine.config import SpecPrefillConfig
from engine.processing.checkpoint import DEMO_MODEL
from engine.protocol import EngineFailed
from tests.e2e.server import SHIPPED_CONFIG

SHIPPED = AppArgs(spec_prefill=SpecPrefillConfig(enabled=True))


def fake_cluster(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], here: str = "a", scorers: tuple[str, ...] = ()
) -> None:
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app, "nodes_offering", {"mlx": nodes, "mlx_scorer": list(scorers)}.__getitem__)
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
def test_a_wrong_key_or_value_is_refused_by_name(args: dict[str, Any], key: str):
    with pytest.raises(ValidationError) as error:
        AppArgs.model_validate(args)
    assert [".".join(map(str, e["loc"])) for e in error.value.errors()] == [key]


def test_a_ray_without_a_name_that_the_replicas_need_is_refused_when_the_app_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(RequestRouter, "_probe_queue_lens")
    with pytest.raises(EngineFailed, match=r"Ray [\d.]+ is not a Ray .* RequestRouter: _probe_queue_lens$"):
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
    # those that are always there: Serve refuses options of others
    assert {d["name"] for d in application["deployments"]} == set(deployments_of(build_app(AppArgs())))


KNOB = re.compile(r"^( +)# ( *(?:[a-z_]+:|- '))", re.MULTILINE)


def left_out(given: BaseModel, path: str = "") -> list[str]:
    """Fields of a configuration that its YAML does not name."""
    missing = []
    for name, value in given:
        if name not in given.model_fields_set:
            missing.append(f"{path}{name}")
        elif isinstance(value, BaseModel):
            missing += left_out(value, f"{path}{name}.")
    return missing


def test_the_shipped_config_shows_every_knob_with_its_default():
    (application,) = yaml.safe_load(KNOB.sub(r"\1\2", SHIPPED_CONFIG.read_text()))["applications"]
    shown = AppArgs.model_validate(application["args"])
    assert shown == SHIPPED
    assert left_out(shown) == []


def test_there_is_one_of_each_per_node(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b", "c"])
    deployments = deployments_of(build_app(AppArgs()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica"}
    shares = []
    for name, deployment in deployments.items():
        config = deployment._deployment_config
        assert config.autoscaling_config.initial_replicas == (0 if name == "MLLM" else 3)
        assert deployment._replica_config.max_replicas_per_node == 1
        shares.append(deployment.ray_actor_options["resources"]["mlx"])
    assert sorted(shares) == [SMALL_SHARE] * 3 + [ENGINE_SHARE]
    assert sum(shares) <= 1 < 2 * ENGINE_SHARE


def test_the_ingress_and_the_engine_rather_than_serve_say_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch):
    """In the largest cluster each ingress lets in what all engines take, so that one engine may see as much."""
    fake_cluster(monkeypatch, ["a"])
    deployments = deployments_of(build_app(AppArgs.model_validate({"engine": {"max_running": 3, "max_queue": 5}})))
    for name in ("ModelReplica", "Ingress"):
        assert deployments[name].max_ongoing_requests > MAX_NODES * 8
    autoscaling = deployments["Ingress"]._deployment_config.autoscaling_config
    assert autoscaling.max_replicas == MAX_NODES


def test_nobody_who_was_let_in_is_turned_away_by_serve():
    for deployment in deployments_of(build_app(scoring())).values():
        assert deployment._deployment_config.max_queued_requests == -1, deployment.name


def test_the_shipped_config_does_not_undo_what_follows_from_its_args():
    (application,) = yaml.safe_load(SHIPPED_CONFIG.read_text())["applications"]
    for deployment in application["deployments"]:
        planning = {"TextMTP": MAX_PLANNING["text"], "MLLM": MAX_PLANNING["mllm"]}.get(deployment["name"])
        assert deployment.get("max_ongoing_requests") == planning
        assert not {"max_queued_requests", "graceful_shutdown_timeout_s"} & set(deployment)


def test_serve_kills_nothing_before_the_answers_that_run_have_had_their_time():
    for drain_timeout_s in (0, 25, 600):
        args = scoring().model_copy(update={"drain_timeout_s": drain_timeout_s})
        deployments = deployments_of(build_app(args))
        for deployment in deployments.values():
            assert deployment._deployment_config.graceful_shutdown_timeout_s >= drain_timeout_s + 10, deployment.name
        assert deployments["Ingress"].init_args[-1] == drain_timeout_s
        engine = deployments["ModelReplica"]
        until_killed_s = engine._deployment_config.graceful_shutdown_timeout_s
        # the ingress has told the clients before the engine does, and Serve kills neither meanwhile
        assert drain_timeout_s + 2 < engine.init_args[-1] < until_killed_s - 10
    assert AppArgs().drain_timeout_s == DRAIN_TIMEOUT_S


def scoring(**spec_prefill: Any) -> AppArgs:
    return AppArgs.model_validate({"spec_prefill": {"enabled": True, **spec_prefill}})


def test_there_is_a_scorer_on_each_node_that_offers_one(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a", "b", "c"], scorers=("c", "d"))
    deployments = deployments_of(build_app(scoring()))
    assert set(deployments) == {"Ingress", "TextMTP", "MLLM", "ModelReplica", "SpecPrefillScorer"}
    scorer = deployments["SpecPrefillScorer"]
    assert scorer.ray_actor_options["resources"] == {"mlx_scorer": SCORER_SHARE}
    assert 2 * SCORER_SHARE > 1
    assert scorer._replica_config.max_replicas_per_node == 1
    engine = deployments["ModelReplica"]
    for deployment, num_nodes, resource, waits_for in (
        (scorer, 0, "mlx_scorer", "ModelReplica"),
        (engine, 3, "mlx", None),
    ):
        autoscaling = deployment._deployment_config.autoscaling_config
        assert autoscaling.initial_replicas == num_nodes
        assert autoscaling.policy.policy_kwargs == {"resource": resource, "waits_for": waits_for}
        assert autoscaling.policy.policy_function == "deployments.policies:OnePerOfferingNode"


def test_the_scorer_rather_than_serve_says_when_there_are_too_many_prompts():
    scorer = deployments_of(build_app(scoring(max_running=3, max_queue=5)))["SpecPrefillScorer"]
    assert scorer.max_ongoing_requests > 8


def test_planning_may_last_beyond_the_deadline_of_a_score():
    arguments: Any = build_app(scoring(deadline_s=500))._bound_deployment.init_args
    scorer, plan_timeout_s, _ = arguments[-3:]
    assert scorer._bound_deployment.name == "SpecPrefillScorer"
    assert plan_timeout_s >= 560


def test_where_nothing_is_scored_no_time_is_given_to_it():
    arguments: Any = build_app(AppArgs())._bound_deployment.init_args
    assert arguments[-2] == PLAN_TIMEOUT_S


def test_there_is_room_at_the_engine_for_what_planners_ask_while_they_hold_its_slots():
    without, sparse = deployments_of(build_app(AppArgs())), deployments_of(build_app(scoring()))
    planning = sum(sparse[name].max_ongoing_requests for name in ("TextMTP", "MLLM"))
    assert planning == 64 + 32
    room = {name: deployment.max_ongoing_requests for name, deployment in without.items()}
    room["ModelReplica"] += planning
    assert {name: sparse[name].max_ongoing_requests for name in room} == room


def test_a_cluster_without_a_place_for_scorers_is_told_how_to_offer_one_or_do_without(monkeypatch: pytest.MonkeyPatch):
    fake_cluster(monkeypatch, ["a"])
    reason = refusal(scoring())
    assert """ray start --resources='{"mlx": 1, "mlx_scorer": 1}'""" in reason
    assert "spec_prefill.enabled: false" in reason
    build_app(AppArgs())


def test_a_draft_that_is_not_there_or_brings_code_is_found_out_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_cluster(monkeypatch, ["a"], scorers=("a",))
    build_app(scoring())
    assert "no-such-draft" in refusal(scoring(draft_model="./no-such-draft"))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "code.py"}}')
    assert "auto_map" in refusal(scoring(draft_model=str(tmp_path)))
    fake_cluster(monkeypatch, ["a"], scorers=("b",))
    build_app(scoring(draft_model=str(tmp_path)))


def test_the_draft_of_the_demo_model_is_beside_it():
    assert app._resolve_draft(SpecPrefillConfig()) == DEMO_MODEL / "draft"


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
def test_a_pinned_prompt_that_no_request_can_match_ends_the_start(
    system: str, http: dict[str, Any], line: str, pattern: str
):
    reason = refusal(pinning({"system": "Be brief."}, {"system": system}, **http))
    assert "engine.prefix_cache.pinned[1]" in reason
    assert line in reason
    assert pattern in reason


def test_a_pinned_prompt_may_hold_what_no_pattern_drops():
    build_app(pinning({"system": f"It is called {BILLING}"}))
    build_app(pinning({"system": BILLING}, volatile_patterns=[]))
    build_app(pinning({"system": "You are helpful.\n"}, volatile_patterns=["^$"], system_policy="error"))


def test_a_pinned_file_is_read_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_a_pinned_file_may_lie_under_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt.txt").write_text(BILLING)
    fake_cluster(monkeypatch, ["a"])
    assert "pinned[0]: line 1" in refusal(pinning({"system_file": "~/prompt.txt"}))


def test_the_options_of_the_file_take_the_place_of_ours():
    overrides = {"MLLM": {"max_ongoing_requests": 7}, "ModelReplica": {"health_check_period_s": 9}}
    deployments = deployments_of(build_graph(AppArgs(), overrides))
    assert deployments["MLLM"].max_ongoing_requests == 7
    assert deployments["TextMTP"].max_ongoing_requests == MAX_PLANNING["text"]
    assert deployments["ModelReplica"]._deployment_config.health_check_period_s == 9
    scorer = deployments_of(build_graph(scoring(), {"SpecPrefillScorer": {"health_check_timeout_s": 4}}))
    assert scorer["SpecPrefillScorer"]._deployment_config.health_check_timeout_s == 4


def test_a_cluster_of_one_node_that_offers_nothing_gets_one_of_each_on_its_head(monkeypatch: pytest.MonkeyPatch):
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
        starts_late = name in ("MLLM", "SpecPrefillScorer")
        assert deployment._deployment_config.autoscaling_config.initial_replicas == (0 if starts_late else 1)


def test_a_cluster_of_several_nodes_must_say_which_of_them_hold_the_model(monkeypatch: pytest.MonkeyPatch):
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}} for name in "ab"]
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    assert "No node of this Ray cluster offers the resource 'mlx'" in refusal(AppArgs())


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_several_nodes_without_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, mode: str | None):
    monkeypatch.delenv("RAY_AUTH_MODE")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    fake_cluster(monkeypatch, ["a", "b"])
    assert "RAY_AUTH_MODE is not `token`" in refusal(AppArgs())
    fake_cluster(monkeypatch, ["a"])
    build_app(AppArgs())


def test_plans_with_images_reach_the_engine_without_anything_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    name = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    for value, expected in ((None, str(64 * 2**20)), ("99", "99")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        for deployment in deployments_of(build_app(AppArgs())).values():
            assert deployment.ray_actor_options["runtime_env"]["env_vars"][name] == expected


def test_what_is_not_in_effect_of_the_environment_is_shown_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    build_app(AppArgs())
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RAY_worker_niceness")
    arguments: Any = build_app(AppArgs())._bound_deployment.init_args
    shown = capsys.readouterr().err
    assert "RAY_worker_niceness=0 is not in effect: engine, ingress and proxies run at nice 15" in shown
    assert "the configuration outside of `args` is known to `orchard serve` alone" in shown
    effective = arguments[3]["effective"]
    assert effective["spec_prefill"] == "off: spec_prefill.enabled is false"
    assert [line.partition("=")[0] for line in effective["environment"]] == ["RAY_worker_niceness"]


def test_another_model_without_a_draft_of_its_own_is_served_without_sparse_prefill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    model = Path(shutil.copytree(DEMO_MODEL / "draft", tmp_path / "model"))
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    args = AppArgs.model_validate({"engine": {"model": str(model)}, "spec_prefill": {"enabled": True}})
    fake_cluster(monkeypatch, ["a"])
    graph = build_app(args)
    deployments = deployments_of(graph)
    assert "SpecPrefillScorer" not in deployments
    assert deployments["TextMTP"].init_args[1].enabled is False
    arguments: Any = graph._bound_deployment.init_args
    assert arguments[3]["effective"]["spec_prefill"] == f"off: no draft_model for {model}"
