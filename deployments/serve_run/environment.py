"""Environment variables that configure Ray for Orchard, set before anything imports Ray.

`orchard_launch.pth` in site-packages calls `prepare` when `serve`, `ray` or `orchard` starts in this environment; child
processes inherit the variables. Values of the operator are kept. Without the file (`python -I`, `zipapp`, an image that
drops it) Orchard still serves correctly; `not_in_effect` lists the differences.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

PROGRAMS = ("serve", "ray", "orchard")

RAY_INIT_HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Variable that names a function that Ray calls when the process connects, before it starts any node."""

INIT_HOOK = "deployments.serve_run.hook.watch_serve_run"


@dataclass(frozen=True)
class EnvironmentDefault:
    """An environment variable, and the value that it gets if the operator has not set it."""

    name: str
    value: str
    without: str
    """Consequence of leaving the variable unset."""
    platform: str | None = None
    """`sys.platform` that the variable is for; None: any."""


DEFAULTS = (
    EnvironmentDefault(
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        "0",
        "under `uv run` Ray packs the working directory and starts every worker through uv, which is slower",
    ),
    EnvironmentDefault("RAY_USAGE_STATS_ENABLED", "0", "Ray reports usage statistics to its developers"),
    EnvironmentDefault(
        "RAY_AUTH_MODE",
        "token",
        "every process that reaches Ray's ports can run code here, not only those that have ~/.ray/auth_token",
    ),
    EnvironmentDefault(
        "RAY_worker_niceness",
        "0",
        "engine, ingress and proxies run at nice 15, so that any busy program on the machine slows them down",
    ),
    EnvironmentDefault(
        "RAY_SERVE_PROXY_USE_GRPC", "1", "each token takes twice the CPU time between the ingress and the HTTP proxy"
    ),
    EnvironmentDefault(
        # build_graph also sets it for the replicas, where plans with images depend on it.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
        str(64 * 2**20),
        "an HTTP response fails when one of its parts is larger than 4 MiB",
    ),
    EnvironmentDefault(
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        "deployments.http_proxy.guard:middlewares",
        "the HTTP proxies do not limit request bodies and connections, nor disconnect clients that do not read; during "
        "a start they answer 404 or queue requests",
    ),
    EnvironmentDefault(
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S",
        "1.0",
        "a replica on a busy machine is asked for its load again after 0.1 s, which fills the log with warnings",
    ),
    EnvironmentDefault(
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
        "60",
        "an HTTP proxy that needs more than 15 s to start, as on a busy machine, is killed and started again",
    ),
    EnvironmentDefault("RAY_health_check_initial_delay_ms", "1000", "a lost node is noticed after 65 s, not after 9 s"),
    EnvironmentDefault("RAY_health_check_period_ms", "1000", "a lost node is noticed after 65 s, not after 9 s"),
    EnvironmentDefault("RAY_health_check_timeout_ms", "2000", "a lost node is noticed after 65 s, not after 9 s"),
    EnvironmentDefault("RAY_health_check_failure_threshold", "3", "a lost node is noticed after 65 s, not after 9 s"),
    EnvironmentDefault(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "1",
        "`ray start` refuses a second Mac, and the head node advertises the address 127.0.0.1",
        platform="darwin",
    ),
    EnvironmentDefault(
        "GRPC_ENABLE_FORK_SUPPORT",
        "0",
        "grpcio's fork handlers abort a process that uses grpc.aio when it starts a subprocess",
        platform="darwin",
    ),
)


def prepare() -> None:
    """Set the defaults in the commands `serve`, `ray` and `orchard`; install the hook in `serve run`.

    It does nothing in other programs of the environment. Only Ray can parse the options of `serve run`: the hook finds
    out whether the command runs a config file.
    """
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program not in PROGRAMS:
        return
    set_defaults()
    if program == "serve" and sys.argv[1:2] == ["run"]:
        os.environ.setdefault(RAY_INIT_HOOK, INIT_HOOK)


def set_defaults(environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables that are unset and meant for this platform, in `environ` or the environment of this process."""
    for default in _defaults_here():
        (os.environ if environ is None else environ).setdefault(default.name, default.value)


def not_in_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """Describe the variables that are unset, with the consequences, and those that the operator has set."""
    environ = os.environ if environ is None else environ
    lines = []
    for default in _defaults_here():
        value = environ.get(default.name)
        if value is None:
            lines.append(f"{default.name}={default.value} is not in effect: {default.without}")
        elif value != default.value:
            lines.append(f"{default.name}={value} is set (Orchard's default: {default.value})")
    return lines


def is_prepared(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether every variable is set, to Orchard's value or the operator's."""
    environ = os.environ if environ is None else environ
    return all(default.name in environ for default in _defaults_here())


def _defaults_here() -> list[EnvironmentDefault]:
    return [default for default in DEFAULTS if default.platform in (None, sys.platform)]
