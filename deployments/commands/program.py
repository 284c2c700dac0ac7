"""The command `orchard`: imports only the module of the verb that is asked for, so that it starts quickly."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from deployments.commands.output import CommandError, UsageError, say

FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
"""Exit statuses besides 0. The last two are 128 and the number of the signal."""


@dataclass(frozen=True)
class Verb:
    """A verb of the command."""

    name: str
    help: str
    module: str = ""
    """Has `add_arguments(parser)` and `run(options)`; '': the verb belongs to deployments.serve_run.cli."""


VERBS = (
    Verb("serve", "start the server and run until Ctrl-C or SIGTERM"),
    Verb("run", "ask the model, or chat with it, in the terminal", "deployments.commands.run"),
    Verb("ps", "show the running server: nodes, memory, queue, slow requests", "deployments.commands.ps"),
    Verb("nodes", "list the nodes of the running server", "deployments.commands.nodes"),
    Verb("drain", "move the answers of a node to the others, before it leaves", "deployments.commands.drain"),
    Verb("join", "join the cluster of a head, after a comparison with it", "deployments.commands.join"),
    Verb("leave", "move the answers of this machine to the others, and leave", "deployments.commands.leave"),
    Verb("revoke", "refuse a machine of the cluster from now on", "deployments.commands.revoke"),
    Verb("launch", "start claude, codex, opencode or qwen on the running server", "deployments.commands.launch"),
    Verb("pull", "download a model, checked before the download", "deployments.commands.pull"),
    Verb("ls", "list the models on this machine, and which can be served", "deployments.commands.ls"),
    Verb("check", "report whether a model can be served on this machine"),
    Verb("bench", "measure the running server: tokens per second of prompts and answers", "deployments.commands.bench"),
    Verb("keys", "make, list and revoke API keys, without a restart of the server", "deployments.commands.keys"),
    Verb("service", "run the server as a service of this user", "deployments.commands.service"),
    Verb("doctor", "check this machine and the server, with remedies", "deployments.commands.doctor"),
    Verb("self-test", "check the engine on this machine"),
    Verb("dashboards", "give Grafana Orchard's dashboard, and Prometheus its configuration"),
    Verb("report", "collect what a bug report needs, without prompts and keys", "deployments.commands.report"),
)
"""In the order of `orchard --help`: what a newcomer needs first."""

EXIT_STATUSES = (
    "Exit status: 0 fine, 1 failed or the answer is no, 2 wrong usage, 130 after Ctrl-C. "
    "`orchard COMMAND --help` tells more."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    verb = next((verb for verb in VERBS if argv[:1] == [verb.name]), None)
    if verb is not None and not verb.module:
        from deployments.serve_run.cli import main as run

        return run(argv)
    parser, own = _parsers(verb)
    if verb is None or own is None:
        parser.parse_args(argv)
        return USAGE  # parse_args has ended the process: there is no such verb, or --help was asked for
    module = import_module(verb.module)
    own.description = module.__doc__
    module.add_arguments(own)
    argv, rest = _divided(argv) if getattr(module, "TAKES_REST", False) else (argv, [])
    options = parser.parse_args(argv)
    options.rest = rest
    try:
        status = module.run(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        own.error(str(error))
    except CommandError as error:
        say(f"error: {error}")
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at its end
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _divided(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return what stands before and behind `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _parsers(chosen: Verb | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """Return the parser of the command, and that of the chosen verb."""
    parser = argparse.ArgumentParser(
        "orchard", description="Serves MLX models behind the OpenAI and Anthropic HTTP APIs.", epilog=EXIT_STATUSES
    )
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found = {verb: verbs.add_parser(verb.name, help=verb.help) for verb in VERBS}
    return parser, None if chosen is None else found[chosen]
