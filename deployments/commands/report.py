"""Collect what a bug report needs into one archive, without prompts, keys, addresses and names; tell what is in it."""

import argparse
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from deployments.commands import connection
from deployments.commands.connection import KEY_VARIABLE, Connection
from deployments.commands.doctor_checks import CHECKS
from deployments.commands.doctor_readings import take
from deployments.commands.output import CommandError, say, show, show_json
from deployments.commands.text_redaction import TextRedaction
from deployments.http.redaction import public_view
from deployments.serve_run.config_file import DEFAULT_CONFIG, chosen_file

NUM_REQUESTS = 20
NUM_LINES = 300
"""Last lines of each log."""
MAX_LINE_CHARS = 2000
HIDDEN_OPTIONS = frozenset(
    {
        "api_keys",
        "pinned",
        "allowed_hosts",
        "allowed_origins",
        "allowed_private_hosts",
        "env_vars",
        "ssl_keyfile_password",
    }
)
"""Options of the configuration whose values are secrets, prompts or addresses."""
TIMELINE_TEXTS = frozenset({"name", "path", "outcome", "object", "finish_reason", "why", "obstacle", "preempted_by"})
"""Texts of a timeline that Orchard writes; others may be a client's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument("--config", help=f"configuration of the server; default: {DEFAULT_CONFIG}, if there is one")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: orchard-report-DATE.tar.gz")
    parser.add_argument("--no-logs", action="store_true", help="leave out the server's logs")
    parser.add_argument("--json", action="store_true", help="print JSON: the archive and its files")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    server = connection.connection_of(options)
    config = chosen_file(options.config)
    parts: dict[str, Callable[[], str]] = {
        "versions.json": lambda: _as_json(versions()),
        "doctor.json": lambda: _as_json(_findings(config, options.url)),
        "status.json": lambda: _as_json(public_view(server.get("/v1/status"))),
        "cache.json": lambda: _as_json(public_view(server.get("/v1/cache"))),
        "requests.json": lambda: _as_json(list(timelines(server))),
        "metrics.txt": lambda: without_key_names(server.text("/metrics")),
    }
    if config is not None:
        parts["serve_config.yaml"] = lambda: redacted_config(Path(config))
    redact = TextRedaction([server.key or ""])
    files = {name: redact(_made(make)) for name, make in parts.items()}
    if not options.no_logs:
        files |= {f"logs/{redact(name)}": text for name, text in logs(redact)}
    path = options.output or Path(time.strftime("orchard-report-%Y%m%d-%H%M%S.tar.gz"))
    _write(path, files)
    sizes = {name: len(text.encode()) for name, text in files.items()}
    if options.json:
        show_json({"path": str(path), "files": sizes})
        return 0
    show(str(path))
    for name, num_bytes in sizes.items():
        say(f"  {num_bytes:>8}  {name}")
    say("Without prompts, answers, keys, addresses and names. Look through it before you send it: tar -xzf, or less.")
    return 0


def _made(make: Callable[[], str]) -> str:
    """Return a part, or why there is none: a report of a server that does not answer is wanted, too."""
    try:
        return make()
    except (CommandError, OSError, ValueError, KeyError, TypeError) as error:
        return f"not available: {type(error).__name__}: {error}\n"


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def versions() -> dict[str, Any]:
    """Return the versions of the system and of all packages."""
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "packages": dict(sorted(found.items(), key=lambda pair: pair[0].lower())),
        "variables": sorted(name for name in os.environ if name.startswith(("RAY_", "HF_", "MLX_", "ORCHARD_"))),
    }


def _findings(config: str | None, url: str) -> list[dict[str, str]]:
    found = take(config, url, None, False, False, os.environ.get(KEY_VARIABLE))
    return [{"check": name, **asdict(check(found))} for name, check in CHECKS.items()]


def timelines(server: Connection) -> Iterator[dict[str, Any]]:
    """Yield the timelines of the slowest and the newest requests, without ids, names of keys and a client's texts."""
    seen = set()
    for which in ("slowest", "newest"):
        for one in server.get(f"/v1/requests?{which}={NUM_REQUESTS}")["data"]:
            if one["id"] not in seen:
                seen.add(one["id"])
                yield figures(server.get(f"/v1/requests/{one['id']}"))


def figures(page: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a timeline, and the texts that are Orchard's own."""
    kept: dict[str, Any] = {}
    for name, value in page.items():
        if isinstance(value, dict):
            kept[name] = figures(value)
        elif isinstance(value, list):
            kept[name] = [figures(item) for item in value if isinstance(item, dict)]
        elif not isinstance(value, str) or name in TIMELINE_TEXTS:
            kept[name] = value
    return kept


def without_key_names(text: str) -> str:
    """Return metrics with numbers in the place of the names of API keys."""
    names = dict.fromkeys(re.findall(r'\bkey="((?:[^"\\]|\\.)*)"', text))
    for i, name in enumerate(name for name in names if name not in ("none", "all")):
        text = text.replace(f'key="{name}"', f'key="key-{i + 1}"')
    return text


def redacted_config(path: Path) -> str:
    """Return a configuration without secrets, prompts and addresses. Comments are left out."""
    return yaml.safe_dump(_without_secrets(yaml.safe_load(path.read_text(encoding="utf-8"))), sort_keys=False)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: f"({len(one) if isinstance(one, list | dict | str) else 1} hidden)"
            if name in HIDDEN_OPTIONS
            else _without_secrets(one)
            for name, one in value.items()
        }
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value


def logs(redact: TextRedaction) -> Iterator[tuple[str, str]]:
    """Yield the name and the last lines of each log of Serve on this machine."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "session_latest" / "logs" / "serve"
    for path in sorted(folder.glob("*.log")):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                lines = deque(file, NUM_LINES)
        except OSError as error:
            lines = [f"not available: {error.strerror}\n"]
        yield path.name, "".join(redact.log_line(line[:MAX_LINE_CHARS].rstrip("\n")) + "\n" for line in lines)


def _write(path: Path, files: dict[str, str]) -> None:
    """Write the archive, readable by its owner alone; nothing is left of one that does not fit. Raises CommandError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode()
                member = tarfile.TarInfo(f"orchard-report/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
