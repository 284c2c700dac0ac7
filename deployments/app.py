"""build_app: the graph, bound in one place, and the arguments that serve_config.yaml gives it."""

# No `from __future__ import annotations` here: Serve validates `args` only if it finds AppArgs itself as annotation.

from itertools import product
from pathlib import Path
from typing import Any

import ray
from pydantic import Field
from ray.serve import Application

from deployments.draining import DRAIN_TIMEOUT_S, ENGINE_MARGIN_S, KILL_MARGIN_S
from deployments.engine_client import PLAN_TIMEOUT_S
from deployments.http.config import HttpConfig
from deployments.http.normalize import normalize
from deployments.ingress import Ingress
from deployments.mllm import MLLM
from deployments.model_replica import ModelReplica
from deployments.policies import Resource, nodes_offering
from deployments.replica import node_id
from deployments.spec_prefill import SpecPrefillScorer
from deployments.text import TextMTP
from engine.config import EngineConfig, Frozen, MediaConfig, SpecPrefillConfig
from engine.processing.checkpoint import draft_of, refuse_code, resolve_checkpoint
from engine.processing.pinned import read_system
from engine.protocol import EngineFailed

ENGINE_SHARE, SMALL_SHARE = 0.9, 0.03
"""Parts of a node's resource `mlx`. A second engine does not fit, one of each other deployment does."""

SCORER_SHARE = 0.9
"""Part of a node's resource `mlx_scorer`: a second scorer does not fit."""

SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""A replica serves, routes and runs its code in one event loop: a third of the CPU per token of Serve's three."""

MAX_NODES = 64

SPARE_SLOTS = 256
"""Beyond what an ingress lets in: requests that are refused, status, cancels."""

MAX_PLANNING = {"text": 64, "mllm": 32}
"""Requests that a planner prepares at once; further ones wait for the same processor in any case. Each holds a slot of
the engine, and for a sparse plan asks it in another what is cached."""

SPARE_SCORES = 8
"""The scorer, not Serve, says when there are too many prompts; and its status must be heard when it is full."""


class AppArgs(Frozen):
    engine: EngineConfig = Field(
        default_factory=lambda: EngineConfig(), description="the model and how it runs, the same on every node"
    )
    spec_prefill: SpecPrefillConfig = Field(
        default_factory=lambda: SpecPrefillConfig(), description="whether and how long prompts are taken in sparsely"
    )
    media: MediaConfig = Field(default_factory=lambda: MediaConfig(), description="limits on the pictures of a request")
    http: HttpConfig = Field(default_factory=lambda: HttpConfig(), description="what the HTTP faces accept")
    drain_timeout_s: float = Field(
        default=DRAIN_TIMEOUT_S,
        ge=0,
        le=3600,
        description="running answers get so long when the server stops or is deployed anew, then they end with an "
        "error that says so",
    )
    served_model_name: str | None = Field(
        default=None,
        description="the name that clients send; default: 'demo', the directory's name, or the hub repository",
    )

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.engine.model).expanduser()
        return path.resolve().name if path.is_dir() else self.engine.model


def build_app(args: AppArgs) -> Application:
    """One replica of each deployment per node that offers `mlx`, following nodes that come and go; a scorer per node
    that offers `mlx_scorer`, if prompts are to be scored.

    Raises EngineFailed when there is no such node, no such model, or a pinned prompt that no request could have.
    """
    num_nodes = _check_cluster(args.engine)
    _check_pinned(args)
    scorer = _bind_scorer(args) if args.spec_prefill.enabled else None
    slots = most_in_flight(args.engine) + SPARE_SLOTS
    questions = sum(MAX_PLANNING.values()) if scorer is not None else 0
    ending = _ending(args)
    engine = ModelReplica.options(
        **_one_per_node("mlx", ENGINE_SHARE, num_nodes),
        **ending,
        max_ongoing_requests=slots + questions,
        request_router_config=_router(),
        health_check_period_s=2,
        health_check_timeout_s=10,
    ).bind(args.engine, args.drain_timeout_s + ENGINE_MARGIN_S)
    small = {**_one_per_node("mlx", SMALL_SHARE, num_nodes), **ending}
    router = {"request_router_config": _router(local_default=True)}
    planner = {**small, **router}
    image_planner = {**_one_per_node("mlx", SMALL_SHARE, num_nodes, waits_for=ModelReplica.name), **ending, **router}
    sparse = (args.spec_prefill, engine, scorer)
    text = TextMTP.options(**planner, max_ongoing_requests=MAX_PLANNING["text"]).bind(args.engine, *sparse)
    mllm = MLLM.options(**image_planner, max_ongoing_requests=MAX_PLANNING["mllm"]).bind(
        args.engine, args.media, *sparse
    )
    shown = args.model_dump(mode="json")
    plan_timeout_s = PLAN_TIMEOUT_S + (args.spec_prefill.deadline_s if scorer is not None else 0)
    timeouts = plan_timeout_s, args.drain_timeout_s
    return Ingress.options(**small, max_ongoing_requests=slots).bind(
        args.model_name, args.engine, args.http, shown, engine, text, mllm, scorer, *timeouts
    )


def most_in_flight(config: EngineConfig) -> int:
    """Requests that an ingress may have let in, and that may hold a slot of an engine, in the largest cluster.

    Of N nodes each ingress lets in what N engines run and queue, so that an engine may see N times what it takes, and
    refuses the rest itself. Serve's limits (max_ongoing_requests) lie beyond: at them a request would wait in Serve,
    where no queue_timeout_s and no fairness holds, while it could be refused, or queued, at once.

    max_queued_requests stays at Serve's default, without a limit. Those who wait in Serve for an engine that starts
    anew have been let in. Those who wait in the proxies for an ingress, while the app is deployed anew, have not: they
    are not turned away, but held until the new ingress runs, which then lets in as many as it may.
    """
    return MAX_NODES * (config.max_running + config.max_queue)


def _ending(args: AppArgs) -> dict[str, Any]:
    """Serve kills a replica only when all that it runs must have ended by itself."""
    return {"graceful_shutdown_timeout_s": args.drain_timeout_s + KILL_MARGIN_S, "graceful_shutdown_wait_loop_s": 0.5}


def _bind_scorer(args: AppArgs) -> Application:
    config = args.spec_prefill
    return SpecPrefillScorer.options(
        **_one_per_node("mlx_scorer", SCORER_SHARE, _check_scorer_nodes(config), waits_for=ModelReplica.name),
        **_ending(args),
        max_ongoing_requests=config.max_running + config.max_queue + SPARE_SCORES,
        request_router_config=_router(local_first=True),
        health_check_period_s=2,
        health_check_timeout_s=10,
        # In serve_config.yaml the deployment may not be named: Serve refuses names of what is switched off.
        logging_config={"enable_access_log": False},
    ).bind(config, args.engine)


def _check_cluster(config: EngineConfig) -> int:
    """The number of nodes that an engine fits on; 1 in Serve's local testing mode."""
    if not ray.is_initialized():
        return 1
    nodes = nodes_offering("mlx")
    if not nodes:
        raise EngineFailed(
            "No node of this Ray cluster offers the resource 'mlx'. "
            """Start Ray on every node that is to hold the model with: ray start --resources='{"mlx": 1}' ..."""
        )
    if _is_among(nodes):
        refuse_code(resolve_checkpoint(config.model, config.revision, weights=False))
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
            "resources": {resource: share},
            "runtime_env": {"env_vars": SAME_LOOP},
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


def _router(**choice: bool) -> dict[str, Any]:
    return {"request_router_class": "deployments.routing.NodeRouter", "request_router_kwargs": choice}
