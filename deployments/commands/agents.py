"""The coding agents that `orchard launch` starts, and what makes each of them use a server.

Settings go into environment variables and arguments of the started process alone; no file of the user is written.
tests/e2e/programs runs the programs themselves with the same settings.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ANY_KEY = "any"
"""Sent where the server has no keys: the programs insist on one."""


@dataclass(frozen=True)
class Target:
    """The server that an agent shall use."""

    url: str
    """Without `/v1`."""
    model: str
    context_tokens: int
    key: str
    """API key, or ANY_KEY."""


@dataclass(frozen=True)
class Settings:
    """Environment variables and arguments that are added to an agent's process."""

    env: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    """Before those of the user."""
    unset: tuple[str, ...] = ()
    """Variables that would send a key of the user's to this server, or have it ask another one."""


@dataclass(frozen=True)
class Agent:
    """A program of a registry."""

    name: str
    """As the user names it; also its executable."""
    title: str
    package: str
    """Package of npm."""
    min_context_tokens: int
    """Its instructions and tools, and a little room for work."""
    settings: Callable[[Target], Settings] = field(repr=False)


def _claude(target: Target) -> Settings:
    models = {f"ANTHROPIC_DEFAULT_{size}_MODEL": target.model for size in ("OPUS", "SONNET", "HAIKU")}
    env = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        **models,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Settings(env, unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"))


def _codex(target: Target) -> Settings:
    provider = {
        "name": "Orchard",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": "ORCHARD_API_KEY",
    }
    values = {
        "model": json.dumps(target.model),
        "model_provider": json.dumps("orchard"),
        "model_context_window": str(target.context_tokens),
        "check_for_update_on_startup": "false",
        **{f"model_providers.orchard.{name}": json.dumps(value) for name, value in provider.items()},
    }
    arguments = tuple(word for name, value in values.items() for word in ("-c", f"{name}={value}"))
    return Settings({"ORCHARD_API_KEY": target.key}, arguments)


def _opencode(target: Target) -> Settings:
    limit = {"context": target.context_tokens, "output": max(1024, target.context_tokens // 8)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Orchard",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": "{env:ORCHARD_API_KEY}"},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    name = f"orchard/{target.model}"
    config = {"provider": {"orchard": provider}, "model": name, "small_model": name, "share": "disabled"}
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "ORCHARD_API_KEY": target.key}
    return Settings(env)


def _qwen(target: Target) -> Settings:
    env = {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model}
    return Settings(env, ("--auth-type", "openai", "--model", target.model))


AGENTS = {
    agent.name: agent
    for agent in (
        Agent("claude", "Claude Code", "@anthropic-ai/claude-code", 24576, _claude),
        Agent("codex", "Codex", "@openai/codex", 20480, _codex),
        Agent("opencode", "OpenCode", "opencode-ai", 16384, _opencode),
        Agent("qwen", "Qwen Code", "@qwen-code/qwen-code", 24576, _qwen),
    )
}
