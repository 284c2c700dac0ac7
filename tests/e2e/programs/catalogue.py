"""The programs, and the ways in which each of them is run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

QUESTION = "What is 12 + 30?"
NOTES_QUESTION = "What does the file $home/work/notes.txt say?"
EDIT_QUESTION = "In the file $home/work/notes.txt, say `loud` instead of `quiet`."
NOTES, NOTES_TEXT = "notes.txt", "The harbor is bright and the old gate is quiet."
"""In the folder where programs run."""
EDITED_TEXT = NOTES_TEXT.replace("quiet", "loud")
MODEL = "demo"
CLAUDE_NAME, GPT_NAMES = "claude-sonnet-4-5", ("gpt-5.5", "gpt-6-sol")
SERVED_NAMES = (MODEL, CLAUDE_NAME, "claude-haiku-4-5", *GPT_NAMES)
"""The server must have these in `http.served_model_names`, but for its own name."""


@dataclass(frozen=True)
class Program:
    """A program of a registry."""

    name: str
    registry: str
    """npm or pypi."""
    package: str
    executable: str
    """Its file name."""
    env: Mapping[str, str]
    """Switches off telemetry, updates, and all else that would ask another server than this one."""


@dataclass(frozen=True)
class Case:
    """One run of a program. `$url` (without a path), `$model`, `$home` and `$question` stand for values of the run."""

    program: str
    face: str
    """The API that it speaks, or what else this run is about."""
    arguments: tuple[str, ...]
    model: str = MODEL
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the home folder -> text."""
    is_screen: bool = False
    """Run on a terminal: the question is typed."""
    launched_as: str | None = None
    """Start it by `orchard launch` with this name; the arguments are those behind `--`."""

    @property
    def name(self) -> str:
        return f"{self.program}, {self.face}"


PROGRAMS = {
    one.name: one
    for one in (
        Program(
            "Claude Code",
            "npm",
            "@anthropic-ai/claude-code",
            "claude",
            {
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_ERROR_REPORTING": "1",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_INSTALLATION_CHECKS": "1",
                "IS_SANDBOX": "1",
            },
        ),
        Program("Codex", "npm", "@openai/codex", "codex", {}),
        Program(
            "opencode",
            "npm",
            "opencode-ai",
            "opencode",
            {
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_SHARE": "1",
            },
        ),
        Program("Qwen Code", "npm", "@qwen-code/qwen-code", "qwen", {"QWEN_TELEMETRY_ENABLED": "false"}),
        Program("Cline", "npm", "cline", "cline", {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}),
        Program(
            "aider", "pypi", "aider-chat", "aider", {"AIDER_ANALYTICS_DISABLE": "true", "AIDER_CHECK_UPDATE": "false"}
        ),
        Program("Continue", "npm", "@continuedev/cli", "cn", {"CONTINUE_TELEMETRY_ENABLED": "0"}),
    )
}


_CODEX_CONFIG = """\
model = "$model"
model_provider = "orchard"
model_context_window = 32768
check_for_update_on_startup = false

[model_providers.orchard]
name = "Orchard"
base_url = "$url/v1"
wire_api = "responses"

[analytics]
enabled = false
"""


def _claude(face: str, *arguments: str, model: str = MODEL, is_screen: bool = False) -> Case:
    env = {
        "ANTHROPIC_BASE_URL": "$url",
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": "$model",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": "$model" for size in ("OPUS", "SONNET", "HAIKU")},
    }
    seen = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "projects": {"$home/work": {"hasTrustDialogAccepted": True}},
    }
    files = {".claude.json": json.dumps(seen)}
    return Case("Claude Code", face, arguments, model, env, files, is_screen)


def _codex(face: str, model: str = MODEL) -> Case:
    arguments = ("exec", "--skip-git-repo-check", "--sandbox", "workspace-write", "$question")
    return Case("Codex", face, arguments, model, files={".codex/config.toml": _CODEX_CONFIG})


def _opencode(face: str, package: str) -> Case:
    options = {"baseURL": "$url/v1", "apiKey": "any"}
    limit = {"context": 32768, "output": 4096}
    provider = {"npm": package, "name": "Orchard", "options": options, "models": {"$model": {"limit": limit}}}
    config = {"autoupdate": False, "share": "disabled", "provider": {"orchard": provider}}
    files = {".config/opencode/opencode.json": json.dumps(config)}
    return Case("opencode", face, ("run", "--model", "orchard/$model", "$question"), files=files)


def _qwen(face: str, auth: str, **env: str) -> Case:
    settings = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}
    files = {".qwen/settings.json": json.dumps(settings)}
    arguments = ("--auth-type", auth, "--model", "$model", "--prompt", "$question")
    return Case("Qwen Code", face, arguments, env=env, files=files)


def _continue(face: str, provider: str, base: str) -> Case:
    model = {"name": "$model", "provider": provider, "model": "$model", "apiBase": base, "apiKey": "any"}
    config = {"name": "Orchard", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    arguments = ("--config", "$home/config.yaml", "--print", "$question")
    return Case("Continue", face, arguments, files={"config.yaml": json.dumps(config)})


def _cline(face: str) -> Case:
    settings = {"provider": "openai-compatible", "apiKey": "any", "model": "$model", "baseUrl": "$url/v1"}
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": provider}}
    files = {".cline/data/settings/providers.json": json.dumps(providers)}
    return Case("Cline", face, ("--provider", "openai-compatible", "--model", "$model", "$question"), files=files)


def _aider(face: str, model: str, *arguments: str, **env: str) -> Case:
    plain = (
        "--no-git",
        "--yes-always",
        "--no-show-model-warnings",
        "--no-check-update",
        "--no-pretty",
        "--no-show-release-notes",
    )
    return Case("aider", face, ("--model", model, *plain, *arguments, "--message", "$question"), env=env)


CASES = (
    _claude("messages", "--print", "$question"),
    _claude("messages, a Claude name", "--print", "$question", model=CLAUDE_NAME),
    _claude("messages, its screen", is_screen=True),
    _codex("responses"),
    *(_codex(f"responses, the name {name}", name) for name in GPT_NAMES),
    _opencode("chat", "@ai-sdk/openai-compatible"),
    _opencode("responses", "@ai-sdk/openai"),
    _opencode("messages", "@ai-sdk/anthropic"),
    _qwen("chat", "openai", OPENAI_BASE_URL="$url/v1", OPENAI_API_KEY="any"),
    _qwen("responses", "openai-responses", OPENAI_BASE_URL="$url/v1", OPENAI_API_KEY="any"),
    _qwen("messages", "anthropic", ANTHROPIC_BASE_URL="$url", ANTHROPIC_API_KEY="any"),
    _cline("chat"),
    _aider("chat", "openai/$model", OPENAI_API_BASE="$url/v1", OPENAI_API_KEY="any"),
    _aider("chat, not streamed", "openai/$model", "--no-stream", OPENAI_API_BASE="$url/v1", OPENAI_API_KEY="any"),
    _aider("messages", "anthropic/$model", ANTHROPIC_API_BASE="$url", ANTHROPIC_API_KEY="any"),
    _continue("chat", "openai", "$url/v1"),
    _continue("messages", "anthropic", "$url/v1/"),
)


def _launched(program: str, name: str, *arguments: str) -> Case:
    return Case(program, "`orchard launch`", (*arguments, "$question"), launched_as=name)


LAUNCHED = (
    _launched("Claude Code", "claude", "--permission-mode", "acceptEdits", "--print"),
    _launched("Codex", "codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write"),
    _launched("opencode", "opencode", "run"),
    _launched("Qwen Code", "qwen", "--approval-mode", "auto-edit", "--prompt"),
)
"""Runs without a setting of ours in a file or the environment: all comes from the command."""
