"""build_app: the graph, bound in one place, and the arguments that serve_config.yaml gives it."""

# No `from __future__ import annotations` here: Serve validates `args` only if it finds AppArgs itself as annotation.

import os
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import ray
from ray.serve import Application

from deployments.args import AppArgs
from deployments.draining import ENGINE_MARGIN_S, KILL_MARGIN_S
from deployments.engine_client import PLAN_TIMEOUT_S
from deployments.http.normalize import normalize
from deployments.ingress import Ingress
from deployments.mllm import MLLM
from deployments.model_checks import check_model
from deployments.model_replica import ModelReplica
from deployments.policies import (
    HEAD_NODE,
    HEAD_SHARE,
    Resource,
    nodes_offering,
    num_living_nodes,
    offers_nothing,
)
from deployments.ray_seams import check_ray
from deployments.replica import node_id
from deployments.serve_run.effective import describe_args, sparse_prefill_line
from deployments.serve_run.environment import is_prepared, not_in_effect
from deployments.spec_prefill import SpecPrefillScorer
from deployments.text import TextMTP
from engine.config import EngineConfig, SpecPrefillConfig
from engine.processing.checkpoint import draft_of, refuse_code, resolve_checkpoint
from engine.processing.pinned import read_system
from engine.protocol import EngineFailed

ENGINE_SHARE, SMALL_SHARE = 0.9, 0.03
"""Parts of a node's resource `mlx`. A second engine does not fit, one of each other deployment does."""

SCORER_SHARE = 0.9
"""Part of a node's resource `mlx_scorer`: a second scorer does not fit."""

SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""A replica serves, routes and runs its code in one event loop: a third of the CPU per token of Serve's three."""

LARGE_PLANS = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(64 * 2**20)
"""A variable and its value, unless the operator has set one: plans carry pixels of images, and gRPC would stop
at 4 MiB."""

AUTH_MODES = ("token", "k8s")
"""Values of RAY_AUTH_MODE with which Ray refuses calls of strangers."""

MAX_NODES = 64

SPARE_SLOTS = 256
"""Beyond what an ingress lets in: requests that are refused, status, cancels."""

MAX_PLANNING = {"text": 64, "mllm": 32}
"""Requests that a planner prepares at once; further ones wait for the same processor in any case. Each holds a slot of
the engine, and for a sparse plan asks it in another what is cached."""

IMAGE_PLANNER_START_S = 120.0
"""How long a request with images waits, after the start of an ingress, for the image planner: it starts after the first
engine. Seconds."""

SPARE_SCORES = 8
"""The scorer, not Serve, says when there are too many prompts; and its status must be heard when it is full."""


def build_app(args: AppArgs) -> Application:
    """What serve_config.yaml names: the graph with the options that it has by itself; Serve adds those of the file.

    Raises what build_graph raises.
    """
    if not is_prepared():
        sys.stderr.write(f"{describe_args(args, not_in_effect())}\n")
    return build_graph(args)


def build_graph(args: AppArgs, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Application:
    """One replica of each deployment per node that offers `mlx`, following nodes that come and go; a scorer per node
    that offers `mlx_scorer`, if prompts are to be scored. A cluster in which no node offers anything, and that has only
    one node, gets one of each.

    Args:
        overrides: deployment -> options that take the place of those that are set here.

    Raises:
        EngineFailed: there is no such node, no such model, an option that has no effect with this model, a pinned
            prompt that no request could have, a cluster of several nodes without tokens, or a Ray without the
            internal names that the replicas use.
    """
    check_ray()
    overrides = overrides or {}
    num_nodes = _check_cluster(args)
    _check_pinned(args)
    is_sparse = args.sparse_prefill_off is None
    spec_prefill = args.spec_prefill.model_copy(update={"enabled": is_sparse})
    scorer = _bind_scorer(args, overrides.get("SpecPrefillScorer", {})) if is_sparse else None
    slots = most_in_flight(args.engine) + SPARE_SLOTS
    questions = sum(MAX_PLANNING.values()) if scorer is not None else 0
    ending = _ending(args)
    engine_options = {
        **_one_per_node("mlx", ENGINE_SHARE, num_nodes),
        **ending,
        "max_ongoing_requests": slots + questions,
        "request_router_config": _router(),
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        **overrides.get("ModelReplica", {}),
    }
    engine = ModelReplica.options(**engine_options).bind(args.engine, args.drain_timeout_s + ENGINE_MARGIN_S)
    small = {**_one_per_node("mlx", SMALL_SHARE, num_nodes), **ending}
    router = {"request_router_config": _router(local_default=True)}
    sparse = (spec_prefill, engine, scorer)
    text_options = {**small, **router, "max_ongoing_requests": MAX_PLANNING["text"], **overrides.get("TextMTP", {})}
    text = TextMTP.options(**text_options).bind(args.engine, *sparse)
    mllm_options = {
        **_one_per_node("mlx", SMALL_SHARE, num_nodes, waits_for=ModelReplica.name),
        **ending,
        "request_router_config": _router(local_default=True, first_wait_s=IMAGE_PLANNER_START_S),
        "max_ongoing_requests": MAX_PLANNING["mllm"],
        **overrides.get("MLLM", {}),
    }
    mllm = MLLM.options(**mllm_options).bind(args.engine, args.media, *sparse)
    plan_timeout_s = PLAN_TIMEOUT_S + (args.spec_prefill.deadline_s if scorer is not None else 0)
    timeouts = plan_timeout_s, args.drain_timeout_s
    ingress_options = {**small, "max_ongoing_requests": slots, **overrides.get("Ingress", {})}
    return Ingress.options(**ingress_options).bind(
        args.model_name, args.engine, args.http, _shown(args), engine, text, mllm, scorer, *timeouts
    )


def _shown(args: AppArgs) -> dict[str, Any]:
    """`config` in /v1/status: what is configured, and what follows from it."""
    return {
        **args.model_dump(mode="json"),
        "effective": {"spec_prefill": sparse_prefill_line(args), "environment": not_in_effect()},
    }


def most_in_flight(config: EngineConfig) -> int:
    """Requests that an ingress may have let in, and that may hold a slot of an engine, in the largest cluster.

    Of N nodes each ingress lets in what N engines run and queue, so that an engine may see N times what it takes, and
    refuses the rest itself. Serve's limits (max_ongoing_requests) lie beyond: at them a request would wait in Serve,
    where no queue_timeout_s and no fairness holds, while it could be refused, or queued, at once.

    max_queued_requests stays at Serve's default, without a limit. Those who wait in Serve for an engine that starts
    anew have been let in. Those that wait in the proxies for an ingress, while the app is deployed anew, have not: they
    are held for at most BRIDGE_S (http_proxy/guard.py), and the new ingress then lets in as many as it may.
    """
    return MAX_NODES * (config.max_running + config.max_queue)


def _ending(args: AppArgs) -> dict[str, Any]:
    """Serve kills a replica only when all that it runs must have ended by itself."""
    return {"graceful_shutdown_timeout_s": args.drain_timeout_s + KILL_MARGIN_S, "graceful_shutdown_wait_loop_s": 0.5}


def _bind_scorer(args: AppArgs, overrides: Mapping[str, Any]) -> Application:
    config = args.spec_prefill
    options = {
        **_one_per_node("mlx_scorer", SCORER_SHARE, _check_scorer_nodes(config), waits_for=ModelReplica.name),
        **_ending(args),
        "max_ongoing_requests": config.max_running + config.max_queue + SPARE_SCORES,
        "request_router_config": _router(local_first=True),
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        # In serve_config.yaml the deployment may not be named: Serve refuses names of what is switched off.
        "logging_config": {"enable_access_log": False},
        **overrides,
    }
    return SpecPrefillScorer.options(**options).bind(config, args.engine)


def _check_cluster(args: AppArgs) -> int:
    """The number of nodes that an engine fits on; 1 in Serve's local testing mode."""
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


def _check_scorer_nodes(config: SpecPrefillConfig) -> int:
    """The number of nodes that a scorer fits on; 1 in Serve's local testing mode."""
    if not ray.is_initialized():
        return 1
    nodes = nodes_offering("mlx_scorer")
    if not nodes:
        raise EngineFailed(
            "spec_prefill.enabled is true, but no node of this Ray cluster offers the resource 'mlx_scorer'. "
            "Start Ray on every node that is to score prompts with: "
            """ray start --resources='{"mlx": 1, "mlx_scorer": 1}' ..., """
            "or switch it off with spec_prefill.enabled: false"
        )
    if _is_among(nodes):
        refuse_code(_resolve_draft(config))
    return len(nodes)


def _resolve_draft(config: SpecPrefillConfig) -> Path:
    """The directory with the draft's configuration. Raises EngineFailed."""
    return resolve_checkpoint(draft_of(config.draft_model), config.draft_revision, weights=False)


def _check_pinned(args: AppArgs) -> None:
    """A line that is dropped from all system messages may not stand in one that is to match them."""
    has_files = ray.is_initialized() and _is_among(nodes_offering("mlx"))
    for i, prompt in enumerate(args.engine.prefix_cache.pinned):
        if prompt.system_file is not None and not has_files:
            continue
        lines = read_system(prompt).removesuffix("\n").split("\n")
        for (number, line), pattern in product(enumerate(lines, 1), args.http.volatile_patterns):
            message = {"role": "system", "content": line + "\n"}
            if normalize([message], volatile_patterns=[pattern]) != (message,):
                raise EngineFailed(
                    f"engine.prefix_cache.pinned[{i}]: line {number} ({line.strip()[:80]!r}) is one that the pattern "
                    f"'{pattern.pattern}' of http.volatile_patterns drops from every request, so that none could match "
                    "this prompt. Remove the line or the pattern."
                )


def _is_among(nodes: list[str]) -> bool:
    """Whether the files that the configuration names are to be on this node; on one that only routes they need not."""
    return node_id() in nodes


def _one_per_node(resource: Resource, share: float, num_nodes: int, waits_for: str | None = None) -> dict[str, Any]:
    """Options of a deployment with one replica per node. waits_for: see OnePerOfferingNode."""
    first = {"min_replicas": 1, "initial_replicas": num_nodes}
    if waits_for is not None:
        first = {"min_replicas": 0, "initial_replicas": 0}
    return {
        "ray_actor_options": {
            "num_cpus": 0,
            "resources": _placement(resource, share),
            "runtime_env": {"env_vars": {**SAME_LOOP, LARGE_PLANS[0]: os.environ.get(*LARGE_PLANS)}},
        },
        "max_replicas_per_node": 1,
        "autoscaling_config": {
            **first,
            "max_replicas": max(MAX_NODES, num_nodes),
            "upscale_delay_s": 1,
            "downscale_delay_s": 10,
            "policy": {
                "policy_function": "deployments.policies:OnePerOfferingNode",
                "policy_kwargs": {"resource": resource, "waits_for": waits_for},
            },
        },
    }


def _placement(resource: Resource, share: float) -> dict[str, float]:
    """Ray's resources by which a replica finds its node."""
    return {HEAD_NODE: HEAD_SHARE} if ray.is_initialized() and offers_nothing() else {resource: share}


def _router(**choice: bool | float) -> dict[str, Any]:
    return {"request_router_class": "deployments.routing.NodeRouter", "request_router_kwargs": choice}
