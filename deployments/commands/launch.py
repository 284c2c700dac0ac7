"""Start a coding agent that uses the running server, or show the settings that make it do so."""

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from deployments.commands import connection
from deployments.commands.agents import AGENTS, ANY_KEY, Agent, Settings, Target
from deployments.commands.connection import KEY_VARIABLE, Connection, Refused
from deployments.commands.output import CommandError, say, show, show_json

TAKES_REST = True
"""Arguments behind `--` are not this verb's: they are in `options.rest`."""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("agent", choices=tuple(AGENTS))
    connection.add_arguments(parser)
    parser.add_argument("--model", help="a name of the served model; default: its first")
    parser.add_argument(
        "--config-only", action="store_true", help="print the settings as shell commands (or --json), and start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --config-only: print JSON")
    parser.add_argument("--any-model", action="store_true", help="start it even if the model does not suffice")
    parser.epilog = "Arguments behind `--` go to the agent: orchard launch claude -- --print 'Hello'"


def run(options: argparse.Namespace) -> int:
    """Run the verb. It ends with the agent's own status, as the agent takes the place of this process."""
    agent = AGENTS[options.agent]
    server = connection.connection_of(options)
    target = _target(server, options.model)
    if not options.any_model:
        check_model(server, target, agent)
    settings = agent.settings(target)
    command = [agent.name, *settings.arguments, *options.rest]
    if options.config_only:
        _show(settings, command, is_secret=options.key is None, as_json=options.json)
        return 0
    path = shutil.which(agent.name)
    if path is None:
        raise CommandError(f"{agent.name} is not on the PATH. Install {agent.title}: npm install -g {agent.package}")
    for warning in _own_settings(agent):
        say(f"warning: {warning}")
    say(f"{agent.title} uses {target.model} at {target.url}, with a context of {target.context_tokens} tokens.")
    env = {name: value for name, value in os.environ.items() if name not in settings.unset} | dict(settings.env)
    sys.stdout.flush()
    os.execve(path, command, env)


def _target(server: Connection, model: str | None) -> Target:
    cards: dict[str, Any] = {one["id"]: one for one in server.get("/v1/models")["data"]}
    name = model or next(iter(cards))
    if name not in cards:
        raise CommandError(f"the server at {server.url} serves {', '.join(cards)}, not {name!r}")
    return Target(server.url, name, cards[name]["max_model_len"], server.key or ANY_KEY)


def check_model(server: Connection, target: Target, agent: Agent) -> None:
    """Check that the model can do what the agent needs. Raises CommandError."""
    if target.context_tokens < agent.min_context_tokens:
        raise CommandError(
            f"{target.model} has a context of {target.context_tokens} tokens; {agent.title} needs at least "
            f"{agent.min_context_tokens}, most of them for its own instructions and tools. Serve another model, or "
            "raise engine.max_context_tokens (--any-model starts it anyway)"
        )
    try:
        server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]})
    except Refused as refused:
        if refused.status != 400:
            raise
        raise CommandError(
            f"{target.model} cannot use tools, which {agent.title} needs (--any-model starts it anyway): {refused}"
        ) from None


def _show(settings: Settings, command: list[str], is_secret: bool, as_json: bool) -> None:
    if as_json:
        show_json({"env": dict(settings.env), "unset": list(settings.unset), "command": command})
        return
    own = os.environ.get(KEY_VARIABLE) if is_secret else None
    for name in settings.unset:
        show(f"unset {name}")
    for name, value in settings.env.items():
        if name != KEY_VARIABLE or own is None:
            show(f'export {name}="${KEY_VARIABLE}"' if own and value == own else f"export {name}={shlex.quote(value)}")
    show(shlex.join(command))


def _own_settings(agent: Agent) -> list[str]:
    """Return what in the user's own settings of the agent may be stronger than the environment."""
    if agent.name != "claude":
        return []
    path = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "settings.json"
    try:
        env = json.loads(path.read_text()).get("env", {})
    except (OSError, ValueError, AttributeError):
        return []
    names = [name for name in env if name.startswith("ANTHROPIC_")]
    return [f"{path} sets {', '.join(names)}, which may be stronger than what is set here"] if names else []
