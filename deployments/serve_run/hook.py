"""watch_serve_run: adds Orchard's checks, watcher and graceful stop to `serve run <config>`, through a hook of Ray."""

import os
import sys
from typing import Any

from deployments.serve_run.checks import CannotStart, check_keys, check_machine, finds_cluster
from deployments.serve_run.config_file import ConfigError, OrchardConfig, read_config
from deployments.serve_run.effective import describe
from deployments.serve_run.environment import RAY_INIT_HOOK, not_in_effect, serve_run_config
from deployments.serve_run.stop import GracefulStop, drain_applications, say
from deployments.serve_run.watch import Watcher


def watch_serve_run(runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check the configuration, then watch the application and stop it gracefully on signals.

    Ray calls this in the main thread of `serve run`, before it starts any process. An invalid file, or a port or GPU in
    use, ends the command with status 1.

    Returns:
        runtime_env, unchanged.
    """
    os.environ.pop(RAY_INIT_HOOK, None)  # child processes of Ray must not inherit it
    path = serve_run_config(sys.argv)
    try:
        config = read_config(path) if path is not None else None
        if config is not None:
            _prepare(config)
    except (ConfigError, CannotStart) as error:
        say(str(error))
        raise SystemExit(1) from None
    return runtime_env


def _prepare(config: OrchardConfig) -> None:
    owns_cluster = address_of(sys.argv) is None and not finds_cluster()
    if owns_cluster:
        check_keys(config)
        check_machine(config)
    say(describe(config, not_in_effect()))
    stop = GracefulStop(lambda: drain_applications({config.name: config.args.drain_timeout_s}))
    stop.install()
    Watcher(config, stop.serving, owns_cluster).start()


def address_of(argv: list[str]) -> str | None:
    """Return the Ray cluster that the command line or RAY_ADDRESS names; None if neither does."""
    for i, word in enumerate(argv):
        if word in ("--address", "-a") and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--address="):
            return word.partition("=")[2]
    return os.environ.get("RAY_ADDRESS") or None
