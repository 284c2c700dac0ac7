"""Binds the Serve graph: every deployment with its options, its placement and its handles."""

# No `from __future__ import annotations` here: Serve validates `args` only if it finds AppArgs itself as annotation.

import inspect
import json
import os
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.serve import Application

from deployments.args import AppArgs
from deployments.autoscaling import (
    HEAD_NODE,
    HEAD_SHARE,
    Resource,
    engines_by_node,
    nodes_offering,
    num_living_nodes,
    offers_nothing,
)
from deployments.draining import ENGINE_MARGIN_S, KILL_MARGIN_S
from deployments.http.normalize import normalize
from deployments.ingress import Ingress
from deployments.model_checks import check_model
from deployments.model_replica import ModelReplica
from deployments.planners.mllm import MLLM
from deployments.planners.text import TextMTP
from deployments.process import node_id
from deployments.prompt_scorer import SpecPrefillScorer
from deployments.ray_internals import check_ray
from deployments.serve_run.effective import describe_args, sparse_prefill_line
from deployments.serve_run.environment import is_prepared, not_in_effect
from engine.errors import EngineFailed
from engine.gpus import MAX_ENGINES
from engine.processing.checkpoint import draft_of, media_kinds, read_config, refuse_code, resolve_checkpoint
from engine.processing.pinned import read_system
from engine.spec_prefill_config import SpecPrefillConfig

ENGINE_SHARE, SMALL_SHARE = 0.95, 0.015
"""Amounts of a node's `mlx` resource: one engine takes the first, a replica of any other deployment the second. They
fit as many engines as the node offers of the resource, up to MAX_ENGINES, and one replica of each other deployment."""

SCORER_SHARE = 0.9
"""Share of a node's `mlx_scorer` resource that a scorer takes. A node fits one."""

SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""Variables that make a replica serve, route and run user code in one event loop. Serve's default of three loops costs
three times the CPU per token."""

LARGE_PLANS = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(64 * 2**20)
"""Variable for the largest gRPC message between replicas, and its default here. Plans carry the pixels of images, and
Serve's own default is 4 MiB."""

AUTH_MODES = ("token", "k8s")
"""Values of RAY_AUTH_MODE with which Ray refuses unauthenticated calls."""

MAX_NODES = 64

ROUTER: dict[str, Any] = {"request_router_config": {"request_router_class": "deployments.calls.router.NodeRouter"}}
"""Options of a deployment whose callers name the node, see NodeRouter."""

NO_LIMIT = 1_000_000
"""Serve's max_ongoing_requests. Admission, engines, planners and scorers bound their requests themselves: they queue in
their own order or refuse at once, while a request that waits in Serve would do so without queue_timeout_s and fairness.
max_queued_requests keeps Serve's default, no limit, too. Requests that wait in a proxy for a new ingress wait at most
BRIDGE_S (http_proxy/guard.py), and the new ingress admits them up to its limit."""


class EngineCount(NamedTuple):
    """How many engines there are."""

    total: int = 1
    num_without_resources: int = 1
    """Those of the only node of a cluster whose nodes offer no resources."""


ONE_ENGINE = EngineCount()


def build_app(args: AppArgs) -> Application:
    """Build the application that serve_config.yaml imports. Serve applies the deployment options of the file itself.

    Raises:
        EngineFailed: see build_graph.
    """
    if not is_prepared():
        sys.stderr.write(f"{describe_args(args, not_in_effect())}\n")
    return build_graph(args)


def build_graph(args: AppArgs, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Application:
    """Bind the graph: on each node that offers `mlx` as many engines as it offers, else one replica per deployment.

    It follows nodes that join and leave. With sparse prefill each node that offers `mlx_scorer` has a scorer. The only
    node of a cluster without resources counts as one that offers both.

    Args:
        args: The `args` of the configuration file.
        overrides: Deployment name to options that replace the ones set here.

    Raises:
        EngineFailed: No node offers a resource, one offers another number of engines than engines_per_node, there are
            fewer GPUs than engines, the model does not exist, an option has no effect with this model, no request could
            match a pinned prompt, a cluster of several nodes runs without Ray's token authentication, or this version
            of Ray lacks an internal name that the replicas use.
    """
    check_ray()
    overrides = overrides or {}
    num_nodes = _check_cluster(args)
    _check_pinned(args)
    num_scorers = _check_scorer_nodes(args.spec_prefill) if args.resolved().spec_prefill.enabled else 0
    num_without_resources = args.engines_here() if _is_plain() else 1
    by_node = engines_by_node(num_without_resources) if ray.is_initialized() else {"": 1}
    _check_offers(args, by_node)
    num_engines = sum(by_node.values())
    options = graph_options(args, overrides, num_nodes, num_scorers, EngineCount(num_engines, num_without_resources))
    shown, args = _shown(args), args.resolved()
    scorer = None
    if args.spec_prefill.enabled:
        scorer = SpecPrefillScorer.options(**options["SpecPrefillScorer"]).bind(args.spec_prefill, args.engine)
    engine = ModelReplica.options(**options["ModelReplica"]).bind(
        args.engine, args.drain_timeout_s + ENGINE_MARGIN_S, args.model_name, num_without_resources
    )
    text = TextMTP.options(**options["TextMTP"]).bind(args, engine, scorer)
    mllm = MLLM.options(**options["MLLM"]).bind(args, engine, scorer)
    return Ingress.options(**options["Ingress"]).bind(args, shown, engine, text, mllm, scorer, num_without_resources)


def graph_options(
    args: AppArgs,
    overrides: Mapping[str, Mapping[str, Any]],
    num_nodes: int = 1,
    num_scorers: int = 1,
    engines: EngineCount = ONE_ENGINE,
) -> dict[str, dict[str, Any]]:
    """Return Serve's options of each deployment by its name.

    Args:
        args: The `args` of the configuration file.
        overrides: Deployment name to options that replace the ones set here.
        num_nodes: Nodes that can hold an engine.
        num_scorers: Nodes that can hold a scorer.
        engines: The engines.
    """
    args = args.resolved()
    common = {**_ending(args), "max_ongoing_requests": NO_LIMIT, **ROUTER}
    often = {"health_check_period_s": 2, "health_check_timeout_s": 10}
    small = {**_one_per_node("mlx", SMALL_SHARE, num_nodes), **common}
    # Serve's RUNNING includes the image planner, except where nothing needs it
    waits_for = None if _may_read_images(args) else ModelReplica.name
    options = {
        "ModelReplica": {**_all_engines(engines), **common, **often},
        "TextMTP": small,
        "MLLM": {**_one_per_node("mlx", SMALL_SHARE, num_nodes, waits_for), **common},
        "Ingress": small,
    }
    if args.spec_prefill.enabled:
        scoring = _one_per_node("mlx_scorer", SCORER_SHARE, num_scorers, waits_for=ModelReplica.name)
        options["SpecPrefillScorer"] = {**scoring, **common, **often}
    return {name: {**known, **overrides.get(name, {})} for name, known in options.items()}


def describe_graph(args: AppArgs, overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the graph of this machine's sources is, as JSON: two that are equal may run in one application."""
    classes = {one.name: one.func_or_class for one in (ModelReplica, TextMTP, MLLM, Ingress, SpecPrefillScorer)}
    graph = {
        name: {"constructor": str(inspect.signature(classes[name])), "options": options}
        for name, options in graph_options(args, overrides).items()
    }
    return json.loads(json.dumps(graph))


def _shown(args: AppArgs) -> dict[str, Any]:
    """Return `config` of /v1/status: the arguments, and the settings derived from them."""
    return {
        **args.model_dump(mode="json"),
        "effective": {"spec_prefill": sparse_prefill_line(args), "environment": not_in_effect()},
    }


def _ending(args: AppArgs) -> dict[str, Any]:
    """Return Serve's shutdown options: a replica is killed only after its requests must have ended by themselves."""
    return {"graceful_shutdown_timeout_s": args.drain_timeout_s + KILL_MARGIN_S, "graceful_shutdown_wait_loop_s": 0.5}


def _check_cluster(args: AppArgs) -> int:
    """Return the number of nodes that can hold an engine; 1 in Serve's local testing mode. Raises EngineFailed."""
    if not ray.is_initialized():
        return 1
    if (num_nodes := num_living_nodes()) > 1:
        if os.environ.get("RAY_AUTH_MODE") not in AUTH_MODES:
            raise EngineFailed(
                f"This Ray cluster has {num_nodes} nodes, and RAY_AUTH_MODE is not `token`: every process that reaches "
                "one of Ray's ports, which are open to the network, could run code on all of them. Stop Ray on every "
                "node, put the same ~/.ray/auth_token there, and start it again with RAY_AUTH_MODE=token"
            )
        if offers_nothing():
            raise EngineFailed(
                "No node of this Ray cluster offers the resource 'mlx'. "
                """Start Ray on every node that is to hold the model with: ray start --resources='{"mlx": 1}' ..."""
            )
    nodes = nodes_offering("mlx")
    if not nodes:
        raise EngineFailed(
            "The nodes of this Ray cluster offer 'mlx_scorer', but none offers 'mlx'. "
            """Start Ray on every node that is to hold the model with: ray start --resources='{"mlx": 1}' ..."""
        )
    if _is_among(nodes):
        check_model(args)
    return len(nodes)


def _check_offers(args: AppArgs, by_node: Mapping[str, int]) -> None:
    """Raise EngineFailed if a node holds another number of engines than the option asks for.

    Args:
        args: The arguments.
        by_node: Engines by node.
    """
    asked = args.engines_per_node
    if asked == "all" or not ray.is_initialized():
        return
    for node, offered in by_node.items():
        if offered != asked:
            raise EngineFailed(
                f"engines_per_node is {asked}, but node {node} offers {offered} of the resource 'mlx', which is the "
                "number of its engines. Start Ray there again with: "
                f"""ray start --resources='{{"mlx": {asked}}}' ..., or set engines_per_node: all"""
            )


def _check_scorer_nodes(config: SpecPrefillConfig) -> int:
    """Return the number of nodes that can hold a scorer; 1 in Serve's local testing mode. Raises EngineFailed."""
    if not ray.is_initialized():
        return 1
    nodes = nodes_offering("mlx_scorer")
    if not nodes:
        raise EngineFailed(
            "spec_prefill.enabled is true, but no node of this Ray cluster offers the resource 'mlx_scorer'. "
            "Start Ray on every node that is to score prompts with: "
            """ray start --resources='{"mlx": 1, "mlx_scorer": 1}' ..., """
            "or disable sparse prefill with spec_prefill.enabled: false"
        )
    if _is_among(nodes):
        refuse_code(_resolve_draft(config))
    return len(nodes)


def _resolve_draft(config: SpecPrefillConfig) -> Path:
    """Return the directory with the draft model's configuration. Raises EngineFailed."""
    return resolve_checkpoint(draft_of(config.draft_model), config.draft_revision, weights=False)


def _check_pinned(args: AppArgs) -> None:
    """Raise EngineFailed for a pinned prompt with a line that http.volatile_patterns removes from every request."""
    has_files = ray.is_initialized() and _is_among(nodes_offering("mlx"))
    for i, prompt in enumerate(args.engine.prefix_cache.pinned):
        if prompt.system_file is not None and not has_files:
            continue
        lines = read_system(prompt).removesuffix("\n").split("\n")
        for (number, line), pattern in product(enumerate(lines, 1), args.http.volatile_patterns):
            message = {"role": "system", "content": line + "\n"}
            if normalize([message], volatile_patterns=[pattern]) != (message,):
                raise EngineFailed(
                    f"engine.prefix_cache.pinned[{i}]: line {number} ({line.strip()[:80]!r}) matches the pattern "
                    f"'{pattern.pattern}' of http.volatile_patterns, which removes it from every request, so that no "
                    "request can match this prompt. Remove the line or the pattern."
                )


def _may_read_images(args: AppArgs) -> bool:
    """Return whether the model reads images; true if its files are not on this node."""
    if ray.is_initialized() and not _is_among(nodes_offering("mlx")):
        return True
    model_dir = resolve_checkpoint(args.engine.model, args.engine.revision, weights=False)
    return bool(media_kinds(model_dir, read_config(model_dir)))


def _is_among(nodes: list[str]) -> bool:
    """Tell whether this node holds a replica, and thus the files that the configuration names."""
    return node_id() in nodes


def _one_per_node(resource: Resource, share: float, num_nodes: int, waits_for: str | None = None) -> dict[str, Any]:
    """Return options for one replica per node that offers the resource. waits_for: see OnePerOfferingNode."""
    first = {"min_replicas": 1, "initial_replicas": num_nodes}
    if waits_for is not None:
        first = {"min_replicas": 0, "initial_replicas": 0}
    return {
        "ray_actor_options": {
            "num_cpus": 0,
            "resources": {HEAD_NODE: HEAD_SHARE} if _is_plain() else {resource: share},
            "runtime_env": {"env_vars": _variables()},
        },
        "max_replicas_per_node": 1,
        "autoscaling_config": {
            **first,
            "max_replicas": max(MAX_NODES, num_nodes),
            "upscale_delay_s": 1,
            "downscale_delay_s": 10,
            "policy": {
                "policy_function": "deployments.autoscaling:OnePerOfferingNode",
                "policy_kwargs": {"resource": resource, "waits_for": waits_for},
            },
        },
    }


def _all_engines(engines: EngineCount) -> dict[str, Any]:
    """Return options for as many replicas as there are engines, see autoscaling.engines_by_node."""
    options = _one_per_node("mlx", ENGINE_SHARE, engines.total)
    options["autoscaling_config"]["max_replicas"] = MAX_NODES * MAX_ENGINES
    options["autoscaling_config"]["policy"]["policy_kwargs"]["num_without_resources"] = engines.num_without_resources
    return options | {"max_replicas_per_node": engines.num_without_resources if _is_plain() else MAX_ENGINES}


def _is_plain() -> bool:
    """Tell whether no node offers a resource; then the head node counts as one that offers all of them."""
    return ray.is_initialized() and offers_nothing()


def _variables() -> dict[str, str]:
    """Return the environment variables of a replica that it cannot do without, whatever started its node."""
    variables = {**SAME_LOOP, LARGE_PLANS[0]: os.environ.get(*LARGE_PLANS)}
    if sys.platform == "darwin":  # grpcio's fork handlers abort a process that uses grpc.aio and starts a subprocess
        variables["GRPC_ENABLE_FORK_SUPPORT"] = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0")
    return variables
