"""What Orchard asks of Ray through the environment, set before anything imports Ray.

`orchard_launch.pth` calls `prepare` whenever Python starts in this environment: in `serve`, in `ray`, and in every
worker that they start. What the operator has set wins.
"""

import json
import os
import sys

DEFAULTS = {
    # `uv run serve ...` must not make Ray pack the working directory and start each worker through uv.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Whoever reaches Ray's ports can run code: nobody without the token in ~/.ray/auth_token. `serve run` makes one.
    "RAY_AUTH_MODE": "token",
    # The proxy reads tokens from the ingress over gRPC: half the CPU per token of Ray's actor calls.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # A plan carries the pixels of its pictures; gRPC would stop at 4 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 2**20),
    # The default 0.1 s is too short for a replica on a busy small machine and only fills the log.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1.0",
    # A node that is gone is noticed within 9 s instead of 65 s; 2 s of silence are still forgiven.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

DARWIN_DEFAULTS = {
    # Without it `ray start` refuses a second Mac, and the head offers itself to others as 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # grpcio's fork handlers abort a process that uses grpc.aio when it starts a subprocess.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}

RESOURCES = {"mlx": 1, "mlx_scorer": 1}
"""What a node offers by which an engine, or a scorer of prompts, may be placed on it."""

RAY_INIT_HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Ray calls the function that this variable names when the process connects, before any node is started."""


def prepare() -> None:
    """Sets the defaults; in `serve run <config>` also gives a local cluster its resources and asks for the watcher."""
    for name, value in {**DEFAULTS, **(DARWIN_DEFAULTS if sys.platform == "darwin" else {})}.items():
        os.environ.setdefault(name, value)
    if serve_run_config(sys.argv) is not None:
        _offer_resources()
        os.environ.setdefault(RAY_INIT_HOOK, "deployments.launch_watch.watch_serve_run")


def serve_run_config(argv: list[str]) -> str | None:
    """The config file of the command line `serve run [options] <config>.yaml`, None for any other command line."""
    if len(argv) < 3 or os.path.basename(argv[0]) != "serve" or argv[1] != "run":
        return None
    return next((word for word in argv[2:] if word.endswith((".yaml", ".yml"))), None)


def _offer_resources() -> None:
    """A Ray node that this process starts offers our resources. Has no effect on a cluster that it joins."""
    try:
        resources = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES") or "{}")
        for name, amount in RESOURCES.items():
            resources.setdefault(name, amount)
    except (ValueError, AttributeError):
        return  # not a JSON object: Ray's own message about it is the better one
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps(resources)
