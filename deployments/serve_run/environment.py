"""Environment variables that configure Ray for Orchard, set before anything imports Ray.

`orchard_launch.pth` in site-packages calls `prepare` when `serve`, `ray` or `orchard` starts in this environment; child
processes inherit the variables. Values of the operator are kept. Without the file (`python -I`, `zipapp`, an image that
drops it, a file that macOS has hidden) Orchard still serves correctly; `not_in_effect` lists the differences.
"""

import contextlib
import os
import resource
import stat
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

SERVERS = ("serve", "orchard")
PROGRAMS = (*SERVERS, "ray")

RAY_INIT_HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Variable that names a function that Ray calls when the process connects, before it starts any node."""

INIT_HOOK = "deployments.serve_run.hook.watch_serve_run"

OPEN_FILES = (65536, 10240)
"""Soft limits of open files for `ray start`, tried in this order; macOS may refuse the first, and its own default of
256 lets a proxy serve 180 connections. A server's own cluster gets Ray's limit, which is the first."""


@dataclass(frozen=True)
class EnvironmentDefault:
    """An environment variable, and the value that it gets if the operator has not set it."""

    name: str
    value: str
    without: str
    """Consequence of leaving the variable unset."""
    platform: str | None = None
    """`sys.platform` that the variable is for; None: any."""
    programs: tuple[str, ...] | None = None
    """Programs that the variable is for; None: any process, also those of a cluster."""


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
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH",
        "deployments.serve_log:quiet_controller",
        "Serve's controller logs lines about autoscaling at each start and stop, although nothing follows the load",
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
        "0",
        "a cluster of this machine alone uses an address of its network, and ends when that address changes",
        programs=SERVERS,
    ),
    EnvironmentDefault(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "1",
        "`ray start` refuses a second Mac, and the head node advertises the address 127.0.0.1",
        platform="darwin",
        programs=("ray",),
    ),
    EnvironmentDefault(
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES",
        str(512 * 2**20),
        "Ray reserves up to 30 % of the machine's memory for images on their way to the engine",
        programs=("serve",),
    ),
    EnvironmentDefault(
        "GRPC_ENABLE_FORK_SUPPORT",
        "0",
        # build_graph also sets it for the replicas, which start such processes.
        "grpcio's fork handlers abort a process that uses grpc.aio when it starts a subprocess",
        platform="darwin",
    ),
)


def prepare() -> None:
    """Set the defaults in the commands `serve`, `ray` and `orchard`; install the hook in `serve run`.

    It does nothing in other programs of the environment. Only Ray can parse the options of `serve run`: the hook finds
    out whether the command runs a config file.
    """
    program = _program()
    if program not in PROGRAMS:
        return
    set_defaults()
    if program == "ray":
        raise_open_files()
    if program == "serve" and sys.argv[1:2] == ["run"]:
        os.environ.setdefault(RAY_INIT_HOOK, INIT_HOOK)


def set_defaults(environ: MutableMapping[str, str] | None = None, program: str | None = None) -> None:
    """Set the variables that are unset and meant for this platform and program.

    Args:
        environ: Where to set them; None: the environment of this process.
        program: Name of the program; None: that of this process.
    """
    for default in _defaults_here(program):
        (os.environ if environ is None else environ).setdefault(default.name, default.value)


def raise_open_files() -> None:
    """Raise the soft limit of open files, which the processes of `ray start` inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in OPEN_FILES:
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


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
    if not is_prepared(environ) and (reason := hidden_files()) is not None:
        lines.append(reason)
    return lines


def is_prepared(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether every variable is set, to Orchard's value or the operator's."""
    environ = os.environ if environ is None else environ
    return all(default.name in environ for default in _defaults_here())


def hidden_files(directory: Path | None = None) -> str | None:
    """Return why Python ignores `.pth` files, which macOS marks as hidden in folders of iCloud; None if it does not.

    Args:
        directory: Of the files; None: site-packages.
    """
    directory = Path(sysconfig.get_path("purelib")) if directory is None else directory
    hidden = [path.name for path in directory.glob("*.pth") if getattr(path.stat(), "st_flags", 0) & stat.UF_HIDDEN]
    if not hidden:
        return None
    return (
        f"macOS has marked {', '.join(sorted(hidden))} in {directory} as hidden, and Python ignores such files: run "
        f"`chflags -R nohidden {sys.prefix}`, and keep the checkout outside of folders that iCloud synchronizes"
    )


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def _defaults_here(program: str | None = None) -> list[EnvironmentDefault]:
    program = _program() if program is None else program
    return [
        default
        for default in DEFAULTS
        if default.platform in (None, sys.platform) and (default.programs is None or program in default.programs)
    ]
