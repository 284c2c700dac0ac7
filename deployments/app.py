"""build_app: the graph, bound in one place, and the arguments that serve_config.yaml gives it."""

# No `from __future__ import annotations` here: Serve validates `args` only if it finds AppArgs itself as annotation.

from itertools import product
from pathlib import Path
from typing import Any

import ray
from pydantic import Field
from ray.serve import Application

from deployments.http.config import HttpConfig
from deployments.http.normalize import normalize
from deployments.ingress import Ingress
from deployments.mllm import MLLM
from deployments.model_replica import ModelReplica
from deployments.policies import mlx_node_ids
from deployments.replica import node_id
from deployments.text import TextMTP
from engine.config import EngineConfig, Frozen, MediaConfig
from engine.processing.checkpoint import refuse_code, resolve_checkpoint
from engine.processing.pinned import read_system
from engine.protocol import EngineFailed

ENGINE_SHARE, SMALL_SHARE = 0.9, 0.03
"""Parts of a node's resource `mlx`. A second engine does not fit, one of each other deployment does."""

SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""A replica serves, routes and runs its code in one event loop: a third of the CPU per token of Serve's three."""

SPARE_SLOTS = 32
"""Requests in planning hold a slot as well; the engine, not Serve, says when there are too many."""


class AppArgs(Frozen):
    engine: EngineConfig = Field(
        default_factory=lambda: EngineConfig(), description="the model and how it runs, the same on every node"
    )
    media: MediaConfig = Field(default_factory=lambda: MediaConfig(), description="limits on the pictures of a request")
    http: HttpConfig = Field(default_factory=lambda: HttpConfig(), description="what the HTTP faces accept")
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
    """One replica of each deployment per node that offers `mlx`, following nodes that come and go.

    Raises EngineFailed when there is no such node, no such model, or a pinned prompt that no request could have.
    """
    num_nodes = _check_cluster(args.engine)
    _check_pinned(args)
    most = args.engine.max_running + args.engine.max_waiting + SPARE_SLOTS
    engine = ModelReplica.options(
        **_one_per_node(ENGINE_SHARE, num_nodes),
        max_ongoing_requests=most,
        request_router_config=_router(local_default=False),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=30,
    ).bind(args.engine)
    planner = {**_one_per_node(SMALL_SHARE, num_nodes), "request_router_config": _router(local_default=True)}
    text = TextMTP.options(**planner, max_ongoing_requests=64).bind(args.engine)
    mllm = MLLM.options(**planner, max_ongoing_requests=32).bind(args.engine, args.media)
    return Ingress.options(**_one_per_node(SMALL_SHARE, num_nodes), max_ongoing_requests=4 * most).bind(
        args.model_name, args.engine, args.http, args.model_dump(mode="json"), engine, text, mllm
    )


def _check_cluster(config: EngineConfig) -> int:
    """The number of nodes that an engine fits on; 1 in Serve's local testing mode."""
    if not ray.is_initialized():
        return 1
    nodes = mlx_node_ids()
    if not nodes:
        raise EngineFailed(
            "No node of this Ray cluster offers the resource 'mlx'. "
            """Start Ray on every node that is to hold the model with: ray start --resources='{"mlx": 1}' ..."""
        )
    if _has_files():
        refuse_code(resolve_checkpoint(config.model, config.revision, weights=False))
    return len(nodes)


def _check_pinned(args: AppArgs) -> None:
    """A line that is dropped from all system messages may not stand in one that is to match them."""
    for i, prompt in enumerate(args.engine.prefix_cache.pinned):
        if prompt.system_file is not None and not _has_files():
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


def _has_files() -> bool:
    """Whether the files that the configuration names are to be on this node; on one that only routes they need not."""
    return ray.is_initialized() and node_id() in mlx_node_ids()


def _one_per_node(share: float, num_nodes: int) -> dict[str, Any]:
    return {
        "ray_actor_options": {
            "num_cpus": 0,
            "resources": {"mlx": share},
            "runtime_env": {"env_vars": SAME_LOOP},
        },
        "max_replicas_per_node": 1,
        "autoscaling_config": {
            "min_replicas": 1,
            "initial_replicas": num_nodes,
            "max_replicas": max(64, num_nodes),
            "upscale_delay_s": 1,
            "downscale_delay_s": 10,
            "policy": {"policy_function": "deployments.policies:OnePerMlxNode"},
        },
        "graceful_shutdown_wait_loop_s": 0.5,
    }


def _router(local_default: bool) -> dict[str, Any]:
    return {
        "request_router_class": "deployments.routing.NodeRouter",
        "request_router_kwargs": {"local_default": local_default},
    }
