"""The command `orchard`. It validates the configuration before it imports Ray, which takes seconds."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.serve_run.adoption import write_shared_config
from deployments.serve_run.checks import CannotStart, ModelCheck, check_keys, check_machine, finds_cluster
from deployments.serve_run.config_file import (
    DEFAULT_CONFIG,
    DEFAULT_HTTP_PORT,
    ConfigError,
    OrchardConfig,
    chosen_file,
    default_config,
    read_config,
)
from deployments.serve_run.effective import describe
from deployments.serve_run.environment import not_in_effect, set_defaults
from deployments.serve_run.head import Head, HeadOptions
from deployments.serve_run.stop import say
from engine.host_memory import on_small_mac

CONFIG = f"default: {DEFAULT_CONFIG} of the current directory if there is one, else the defaults of every option"
MODEL = "'demo' (a toy), 'smollm2' (a small real model), a local directory, or a hub repository"
OBJECT_STORE_MIB = 512


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the command `orchard`."""
    parser = argparse.ArgumentParser("orchard", description="Serves MLX models behind the OpenAI HTTP API.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="start the server and run until Ctrl-C or SIGTERM",
        description="Checks the configuration, the port and the GPU, starts Ray and the server, and runs until Ctrl-C "
        "or SIGTERM, after which running requests get args.drain_timeout_s to finish. Exits with status 1 when the "
        "server cannot start or has failed for good.",
    )
    _add_serve_arguments(serve)
    check = commands.add_parser(
        "check",
        help="report whether a model can be served on this machine",
        description="Reports a model's family, media, MTP head and memory against this machine's, without reading its "
        "weights. Exits with status 1 when it cannot be served.",
    )
    _add_check_arguments(check)
    self_test = commands.add_parser(
        "self-test",
        help="check the engine on this machine",
        description="Runs a model through the engine on this machine's device: equal tokens however they are computed, "
        "memory, kernels, speed. Prints a report for a bug report. Exits with status 1 when something is broken.",
    )
    _add_self_test_arguments(self_test)
    dashboards = commands.add_parser(
        "dashboards",
        help="give Grafana Orchard's dashboard, and Prometheus its configuration",
        description="Puts Orchard's dashboard into the folder that Grafana reads with Ray's configuration, to be "
        "repeated after each start of Ray, and prints a prometheus.yml to standard output. Reports to standard error "
        "what else keeps charts empty. Exits with status 1 when the dashboard cannot be put there.",
    )
    _add_dashboards_arguments(dashboards)
    options = parser.parse_args(argv)
    if options.command == "serve":
        _check_serve_arguments(serve, options)
    return options


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL}; default: that of the file")
    serve.add_argument("--config", metavar="FILE", help=CONFIG)
    serve.add_argument("--port", type=int, help=f"default: that of the file, else {DEFAULT_HTTP_PORT}")
    serve.add_argument("--check", action="store_true", help="validate the configuration, print it, and exit")
    serve.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        help="Ray cluster to join; default: RAY_ADDRESS, else the cluster of the last `ray start`, else a new one",
    )
    _add_cluster_arguments(serve)
    serve.add_argument(
        "--dashboard",
        action=argparse.BooleanOptionalAction,
        default=not on_small_mac(),
        help="start Ray's dashboard (http://127.0.0.1:8265) in a new cluster; default: yes, but not on a Mac with at "
        "most 16 GiB, where its 0.3 GiB are missed",
    )
    serve.add_argument(
        "--object-store-mib",
        type=int,
        default=OBJECT_STORE_MIB,
        help=f"MiB of shared memory of a new cluster, for images sent to the engine; default: {OBJECT_STORE_MIB}",
    )


def _add_cluster_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--cluster",
        action="store_true",
        help="be the head of a cluster that other machines join by `orchard join`, or continue the one that this "
        "machine was the head of",
    )
    serve.add_argument(
        "--interface",
        metavar="NAME|ADDRESS",
        help="with --cluster: interface by which the other machines reach this one, such as en0, or its address; "
        "default: that of the default route",
    )
    serve.add_argument(
        "--new-cluster",
        action="store_true",
        help="with --cluster: forget the cluster that this machine was the head of, its token and its certificates; "
        "machines that are still in it end",
    )
    serve.add_argument(
        "--no-tls",
        action="store_true",
        help="with --cluster: do not encrypt traffic between the machines: prompts can be read on the network, and so "
        "can the token, with which code can be run on all machines",
    )
    serve.add_argument(
        "--adopt",
        action="store_true",
        help="with --cluster, on a member: take the cluster over from a head that is gone for good, with the copy of "
        "its log that this machine has; without MODEL and --config with its configuration",
    )
    serve.add_argument(
        "--force",
        action="store_true",
        help="with --adopt: also with a copy of the log that is older than the head's last answer",
    )


def _add_check_arguments(check: argparse.ArgumentParser) -> None:
    check.add_argument("model", help=MODEL)
    check.add_argument("--draft-model", help="a draft model for sparse prefill, to be compared")
    check.add_argument("--rope-scaling", metavar="TYPE:FACTOR", help="engine.rope_scaling, such as yarn:4")


def _add_self_test_arguments(self_test: argparse.ArgumentParser) -> None:
    self_test.add_argument("--model", default="demo", help=MODEL)
    self_test.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    self_test.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    self_test.add_argument("--quick", action="store_true", help="short answers; speeds mean little")


def _add_dashboards_arguments(dashboards: argparse.ArgumentParser) -> None:
    dashboards.add_argument("--config", metavar="FILE", help=CONFIG)
    dashboards.add_argument(
        "--grafana", type=Path, metavar="DIR", help="folder of Grafana's dashboards, instead of that of Ray's session"
    )
    dashboards.add_argument(
        "--key-file",
        type=Path,
        default=Path("orchard.key"),
        metavar="FILE",
        help="file with an API key for Prometheus, of use where the server has keys; default: orchard.key",
    )
    dashboards.add_argument(
        "--check", action="store_true", help="write nothing, and exit with status 1 when anything is missing"
    )


def _check_serve_arguments(serve: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with a message if the arguments contradict each other."""
    if options.model is not None and options.model.endswith((".yaml", ".yml")) and Path(options.model).is_file():
        serve.error(f"{options.model} is a configuration file: orchard serve --config {options.model}")
    if options.cluster and options.address:
        serve.error(f"--cluster makes a cluster; --address, or RAY_ADDRESS, names another one: {options.address}")
    for name in ("interface", "new_cluster", "adopt", "no_tls"):
        if getattr(options, name) and not options.cluster:
            serve.error(f"--{name.replace('_', '-')} has no effect without --cluster")
    if options.force and not options.adopt:
        serve.error("--force has no effect without --adopt")
    for name in ("interface", "new_cluster"):
        if getattr(options, name) and options.adopt:
            serve.error(
                f"--{name.replace('_', '-')} contradicts --adopt, which keeps the cluster and this member's address"
            )
    if options.object_store_mib < 100:
        serve.error(f"--object-store-mib: {options.object_store_mib} is less than Ray's minimum of 100")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    began_s = time.monotonic()
    options = arguments(sys.argv[1:] if argv is None else argv)
    if options.command == "check":
        return _check_model(options)
    if options.command == "self-test":
        return _test_engine(options)
    if options.command == "dashboards":
        return _place_dashboards(options)
    return _serve(options, began_s)


def _serve(options: argparse.Namespace, began_s: float) -> int:
    """Check what the server needs, start it, and run it until it ends; return the exit status.

    Args:
        options: The arguments.
        began_s: When the command began, on the monotonic clock.
    """
    set_defaults()
    try:
        adopted = _adopted_config(options)
        config = _read(adopted or options.config, options.model, options.port)
        if options.check:
            check_keys(config)
            say(describe(config, not_in_effect()))
            return 0
        object_store_bytes, environment = options.object_store_mib * 2**20, not_in_effect()
        head = None
        if options.cluster:
            chosen = HeadOptions(
                options.interface, options.new_cluster, options.adopt, options.force, has_tls=not options.no_tls
            )
            head = Head(config, chosen, options.dashboard, object_store_bytes)
            address = head.address
        else:
            address = options.address or ("auto" if finds_cluster() else None)
        model_check = None
        if head is not None and head.is_beside:
            check_keys(config)  # port and GPU are those of the member's server on this machine
        elif address is None or head is not None:
            check_keys(config)
            check_machine(config)
            model_check = ModelCheck(config)
        say(describe(config, environment))
        from deployments.serve_run.server import Server  # imports Ray, beside the check of the model

        if model_check is not None:
            model_check.wait()
    except (ConfigError, CannotStart) as error:
        say(str(error))
        return 1
    return Server(config, address, options.dashboard, object_store_bytes, began_s, head).run()


def _adopted_config(options: argparse.Namespace) -> str | None:
    """Return the file with the head's configuration if --adopt names no other one. Raises CannotStart."""
    if not options.adopt or options.model is not None or options.config is not None:
        return None
    try:
        return write_shared_config(ClusterFolder())
    except FolderError as error:
        raise CannotStart(str(error)) from None


def _check_model(options: argparse.Namespace) -> int:
    """Run the engine's report in a process of its own, as this one does not load MLX; return its exit status."""
    given = {"--draft-model": options.draft_model, "--rope-scaling": options.rope_scaling}
    more = [word for name, value in given.items() if value is not None for word in (name, value)]
    return _run_engine("--check", "--model", options.model, *more)


def _test_engine(options: argparse.Namespace) -> int:
    """Run the engine's self-test in a process of its own; return its exit status."""
    quick = ["--quick"] if options.quick else []
    chosen = ["--model", options.model, "--device", options.device, "--dtype", options.dtype]
    return _run_engine("--self-test", *chosen, *quick)


def _place_dashboards(options: argparse.Namespace) -> int:
    """Put the dashboard into Grafana's folder; return the exit status."""
    from deployments.serve_run.dashboards import run

    try:
        config = _read(options.config)
    except ConfigError as error:
        say(str(error))
        return 1
    return run(config, options.grafana, options.key_file.absolute(), options.check)


def _run_engine(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "engine", *arguments]).returncode


def _read(path: str | None, model: str | None = None, port: int | None = None) -> OrchardConfig:
    path = chosen_file(path)
    if path is None:
        return default_config(model, port)
    config = read_config(path, model, port)
    if config is None:
        raise ConfigError(path, ["applications: none is Orchard (import_path: deployments.app:build_app)"])
    if len(config.raw["applications"]) > 1:
        raise ConfigError(path, ["applications: `orchard serve` serves only Orchard; use `serve run` for several"])
    return config
