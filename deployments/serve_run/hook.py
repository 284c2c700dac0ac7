"""watch_serve_run: adds Orchard's checks, watcher and graceful stop to `serve run <config>`, through a hook of Ray."""

import os
from pathlib import Path
from typing import Any

import click

from deployments.serve_run.checks import CannotStart, ModelCheck, check_keys, check_machine, finds_cluster
from deployments.serve_run.config_file import ConfigError, OrchardConfig, read_config
from deployments.serve_run.effective import describe
from deployments.serve_run.environment import RAY_INIT_HOOK, not_in_effect
from deployments.serve_run.node_start import prepare_node
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
    command = click.get_current_context(silent=True)
    options = command.params if command is not None else {}
    path = options.get("config_or_import_path", "")
    try:
        config = read_config(path) if Path(path).is_file() else None
        if config is not None:
            _prepare(config, joins=bool(options["address"] or os.environ.get("RAY_ADDRESS")))
    except (ConfigError, CannotStart) as error:
        say(str(error))
        raise SystemExit(1) from None
    return runtime_env


def _prepare(config: OrchardConfig, joins: bool) -> None:
    """Check, describe and watch an application. joins: whether the command or RAY_ADDRESS names a Ray cluster."""
    owns_cluster = not joins and not finds_cluster()
    if owns_cluster:
        check_keys(config)
        check_machine(config)
        ModelCheck(config).wait()
    say(describe(config, not_in_effect()))
    stop = GracefulStop(lambda: drain_applications({config.name: config.args.drain_timeout_s}))
    stop.install()
    Watcher(config, stop.serving, owns_cluster).start()
    if owns_cluster:
        prepare_node()
